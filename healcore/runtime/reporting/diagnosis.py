"""Writes the diagnosis of a run's end, live or killed: observations, actions and advice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from healcore.console import counted, first_of
from healcore.core.decision import Cause, names_of
from healcore.events.models import Ending
from healcore.events.sentences import batch_names, flags_text, readings_text
from healcore.history import RunState
from healcore.runtime.faults.failures import FAILURES, causes_of
from healcore.runtime.reporting.faults_found import faults_found
from healcore.runtime.reporting.run_outcome import RunOutcome

_WIDTH = 96
_SHOWN = 5
_MAX_ROLLBACKS = 3  # limit of the rollbacks that a diagnosis describes first
_MAX_FAULTS = 10  # limit of the faults that a diagnosis lists

_EXTREME_RATE = 100.0  # ratio to the healthy rate that no schedule reaches on purpose

_FAULTS = Cause.OOM | Cause.DATA | Cause.NETWORK | Cause.HANG | Cause.UNKNOWN | Cause.WORKER
"""Causes of exceptions. A rollback is not a response to them."""

AFTER_A_KILL = (
    "look for the out-of-memory killer (dmesg), the scheduler's time limit or preemption, and the "
    "machine's own log"
)
"""Advice about a process that was killed."""

STATES = {
    RunState.COMPLETED: "completed",
    RunState.STOPPED: "stopped by the policy",
    RunState.EXCEPTION: "ended by an exception",
    RunState.SIGNAL: "ended by a signal",
    RunState.REQUESTED: "ended on request",
    RunState.INTERRUPTED: "interrupted from the keyboard",
    RunState.KILLED: "killed",
    RunState.ENDED: "ended",
    RunState.GONE: "killed: the process is gone, and there is no end event",
    RunState.RUNNING: "still running",
    RunState.UNKNOWN: "unknown: still running, or killed",
}
"""State of a run -> clause."""

_REPEATED = (
    "Rolling back did not help: more of the data is bad than was skipped, the learning rate is too "
    "high, or the cause is the model, its precision or its optimizer's settings, or is older than "
    "the checkpoints."
)
"""Advice after several rollbacks."""


_HEADLINES = {
    Ending.COMPLETED: "The run is complete {}.",
    Ending.STOPPED: "healcore stopped the run {}.",
    Ending.EXCEPTION: "The program raised an exception {}",
    Ending.SIGNAL: "The run was ended from outside {}.",
    Ending.REQUESTED: "The run was ended on request {}.",
    Ending.INTERRUPTED: "The run was interrupted from the keyboard {}.",
    Ending.KILLED: "The process was killed without notice; its last record is {}. It could not "
    f"record why: {AFTER_A_KILL}.",
}


def explain(outcome: RunOutcome) -> str:
    """Writes the diagnosis for a person: a headline, then paragraphs with a label.

        The program raised an exception at step 412: ValueError: ...
        Rolled back: from step 216 to the checkpoint of step 150, because earlier weights were
          better on the same batches since step 181. The learning rate was 0.15, ...
        Seen: loss spike from step 398 on. At the first alarm: loss 9.1 (limit 4).
        Faults found:
          - step 240: nonfinite loss. Skipped 1 step.
          - steps 398 to 411: loss spike. Skipped 1 step.
        Tried: skipped 2 steps.
        Look at:
          - The loss rose far above its level. ...
        Last known-good: the checkpoint of step 300, in runs/7/step-300.

    Args:
        outcome: how the run has ended.

    Returns:
        The text, in lines of at most 96 characters except for paths. Paragraphs about which there
        is nothing to say are absent.
    """
    parts = [_headline(outcome)]
    parts += _paragraph("Not healed", _not_healed(outcome))
    parts += _paragraph("Rolled back", _rolled_back(outcome))
    parts += _paragraph("Recovered", _recovered(outcome))
    parts += _paragraph("Seen", _seen(outcome))
    parts += _paragraph("State", _state(outcome))
    parts += _list_faults(outcome)
    parts += _paragraph("Tried", _tried(outcome))
    is_healthy = outcome.ending == Ending.COMPLETED and not outcome.open and not outcome.unrepaired
    if not is_healthy or outcome.nonfinite_saves or outcome.fault:
        parts += _list_hints(_hints(outcome))
    else:
        parts += _list_hints(advice(_alarms_alone(outcome)))
    parts.append(_last_good(outcome))
    return "\n".join(parts)


def _paragraph(label: str, sentences: Iterable[str]) -> list[str]:
    """A paragraph with a label, or nothing without a sentence."""
    text = " ".join(sentences)
    if not text:
        return []
    return [_wrapped(text, first=f"{label}: ", then="  ")]


def _list_hints(hints: Sequence[str]) -> list[str]:
    """The paragraph about what to look at: its lines, or nothing without a hint."""
    if not hints:
        return []
    lines = ["Look at:"]
    for hint in hints:
        lines.append(_wrapped(hint, first="  - ", then="    "))
    return lines


def _headline(outcome: RunOutcome) -> str:
    because = outcome.why
    if outcome.ending == Ending.EXCEPTION:
        because = outcome.exception
    at = f"at step {outcome.step}"
    if because:
        at += f": {because}"
    headline = _HEADLINES[Ending(outcome.ending)].format(at)
    if outcome.ending in (Ending.EXCEPTION, Ending.KILLED):
        return _wrapped(headline, then="  ")
    return headline


def _hints(outcome: RunOutcome) -> list[str]:
    """Collects the advice for a person, about this run first, then about its causes."""
    hints: list[str] = []
    cause = outcome.cause
    if outcome.unrepaired:
        hints.append(UNREPAIRED)
        if outcome.ending == Ending.COMPLETED and not outcome.open:
            return hints  # the incidents are over
    for hint in (_extreme_rate(outcome), _damaged_weights(outcome)):
        if hint:
            hints.append(hint)
    if outcome.hint:
        hints.append(outcome.hint)
    last = outcome.history.last_incident
    if last is not None and last.diagnosis:
        hints.append(last.diagnosis)
        cause &= ~Cause.NONFINITE_GRAD  # the gradients were finite
    cause |= outcome.lasting | _alarms_alone(outcome)
    if not outcome.hint:  # a hint is about this exception, the advice about all of the same cause
        cause |= outcome.fault
    return hints + advice(cause, rollbacks=len(outcome.history.rollbacks))


def _alarms_alone(outcome: RunOutcome) -> Cause:
    """Causes of the alarms about which nothing was done: only a person can act on them."""
    history = outcome.history
    causes = Cause(0)
    for step, names in history.alarms_outside.items():
        if step not in history.alarms_undone_by:
            causes |= causes_of(names)
    return causes


def _extreme_rate(outcome: RunOutcome) -> str:
    """Says that the learning rate was far above the healthy rate, or an empty string.

    Then the rate is the cause, and NaN in weights and gradients is a consequence.
    """
    at_fault, healthy = 0.0, 1.0
    for event in outcome.history.rollbacks:
        if not event.lr_at_fault or not event.lr_limit:
            continue
        # Where no healthy rate is known, the limit is a quarter of the rate.
        if event.lr_at_fault / event.lr_limit > at_fault / healthy:
            at_fault, healthy = event.lr_at_fault, event.lr_limit
    if at_fault < _EXTREME_RATE * healthy:
        return ""
    text = (
        f"The learning rate was {at_fault:.3g}, and at most {healthy:.3g} in the healthy steps: "
        "look at what sets the rate."
    )
    start = outcome.history.start
    if start is not None and start.framework == "torch":
        text += (
            ' Does the program multiply param_groups[i]["lr"] under a scheduler that computes its '
            "next rate from this number?"
        )
    return text


def _damaged_weights(outcome: RunOutcome) -> str:
    """Where to look if the weights themselves were NaN, or an empty string.

    The loss and the gradients are NaN as a consequence then, so the advice about them misleads.
    """
    for event in outcome.history.newest["assessment"]:
        if event.verdict == "damage" and event.by == "weights" and event.onset is not None:
            return (
                f"The weights were NaN or Inf since step {event.onset}, so NaN in the loss follows "
                "from them. Steps with NaN are skipped, so look at what else writes the weights, "
                "and at the optimizer's settings."
            )
    return ""


def _last_good(outcome: RunOutcome) -> str:
    if outcome.last_good is None:
        return _wrapped(_no_good_checkpoint(outcome), first="Last known-good: ", then="  ")
    text = f"Last known-good: the checkpoint of step {outcome.last_good}"
    if outcome.unrepaired and outcome.last_good > outcome.unrepaired[0]:
        text += " (saved after the damage began, so its weights may be damaged)"
    elif outcome.probation is not None and outcome.step > outcome.last_good:
        text += f" ({later_ones_need(outcome.probation)})"
    if outcome.last_good_path:
        text += f", in {outcome.last_good_path}"
    return f"{text}."  # not wrapped: a path stays on one line


def later_ones_need(probation: int | None) -> str:
    """Explains why checkpoints after the newest known-good checkpoint are not known-good.

    Args:
        probation: healthy steps after which a checkpoint is known-good, or None if unknown.

    Returns:
        A clause: "later ones need 100 healthy steps after them".
    """
    if probation is None:
        return "later ones need more healthy steps after them"
    return f"later ones need {counted(probation, 'healthy step')} after them"


_WHY_ROLLED_BACK = {
    "earlier_weights": "earlier weights were better on the same batches",
    "nonfinite_steps": "no step was finite any more",
    "intended_numbers": "the program changes a held number on purpose",
}
"""`EventRecord.by` of a rollback -> clause about the reason."""


def _rolled_back(outcome: RunOutcome) -> Iterator[str]:
    """The newest rollbacks with their reasons: the incidents after them are often small."""
    if outcome.history.observes:
        return
    rollbacks = outcome.history.rollbacks
    if len(rollbacks) > _MAX_ROLLBACKS:
        yield f"{_times(len(rollbacks))}; the last {_MAX_ROLLBACKS}:"
    for place, event in enumerate(rollbacks[-_MAX_ROLLBACKS:]):
        text = f"from step {event.step or 0} to the checkpoint of step {event.checkpoint}"
        if place:
            text = f"Then {text}"
        why = event.problem or _WHY_ROLLED_BACK.get(event.by or "")
        if why:
            text += f", because {why}"
        elif event.cause:
            text += f", because of {flags_text(event.cause)}"
        if event.onset is not None:
            text += f", since step {event.onset}"
        yield f"{text}."
        if event.lr_at_fault and event.lr_limit and event.lr_at_fault > event.lr_limit:
            times = event.lr_at_fault / event.lr_limit
            yield (
                f"The learning rate was {event.lr_at_fault:.3g}, {times:.3g} times the limit since "
                f"then ({event.lr_limit:.3g})."
            )


def _not_healed(outcome: RunOutcome) -> Iterator[str]:
    """Which damage the weights still have, and why."""
    if not outcome.unrepaired:
        return
    yield f"{unrepaired_text(outcome.unrepaired)}."
    for event in reversed(outcome.history.newest["assessment"]):
        if event.verdict == "accepted" and event.why:
            yield f"{event.why[:1].upper()}{event.why[1:]}."
            return


def _recovered(outcome: RunOutcome) -> Iterator[str]:
    """From which accepted damage the run has recovered at its end."""
    onsets: list[int] = []
    why = ""
    for event in outcome.history.newest["assessment"]:
        if event.verdict == "recovered" and event.why:
            onsets.append(event.onset or 0)
            why = event.why
    if onsets:
        yield f"{recovered_text(onsets)}: {why}."


def recovered_text(onsets: Sequence[int]) -> str:
    """Describes accepted damage from which the run has recovered.

    Args:
        onsets: the steps at which the damage began, at least one.

    Returns:
        A clause, for example "nothing is left of the damage since step 267".
    """
    return f"nothing is left of the damage since {_steps_of(onsets)}"


def unrepaired_text(onsets: Sequence[int]) -> str:
    """Describes damage that was not repaired.

    Args:
        onsets: the steps at which the damage begins, at least one.

    Returns:
        A clause, for example "damage since step 267 was not repaired".
    """
    return f"damage since {_steps_of(onsets)} was not repaired"


def _steps_of(onsets: Sequence[int]) -> str:
    """Names some steps, for example "step 7" or "steps 7, 19"."""
    if len(onsets) == 1:
        return f"step {onsets[0]}"
    return f"steps {first_of([str(onset) for onset in onsets], _SHOWN)}"


UNREPAIRED = (
    "healcore could not repair the damage. Check the learning rate, the data and what writes the "
    "weights at the step where the damage begins. If the program makes this change on purpose, "
    "nothing is wrong."
)
"""Advice about damage that was not repaired."""


def _seen(outcome: RunOutcome) -> Iterator[str]:
    last = outcome.history.last_incident
    if outcome.lasting:
        yield f"{lasting_text(outcome)}."
    total = counted(outcome.counts.incidents, "incident")
    if last is None:
        if outcome.counts.incidents:
            yield f"{total}, all resolved."
        return
    text = f"{flags_text(last.cause)} from step {last.onset_step:.0f} on"
    if last.over or outcome.open is False:
        text += ", resolved by the end"
    yield f"{text}."
    if last.readings is not None:
        readings = readings_text(last.readings, last.cause)
        if readings and last.readings.threshold > 0:
            readings += f" (limit {last.readings.threshold:.3g})"
        if readings:
            yield f"At the first alarm: {readings}."
    if last.evidence:
        norms = [f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in last.evidence]
        yield f"Unusual gradients: {first_of(norms, _SHOWN)}."
    if last.batches:
        yield f"Its data: {first_of(batch_names(last.batches, last.rows), _SHOWN)}."
    if outcome.counts.incidents > 1:
        yield f"The run had {total}."


def lasting_text(outcome: RunOutcome) -> str:
    """Describes the lasting causes at the end of a run.

    Args:
        outcome: how the run has ended; `lasting` is not empty.

    Returns:
        A clause, for example "plateau at the end, since its first alarm at step 800".
    """
    lasting = names_of(outcome.lasting)
    text = f"{flags_text(lasting)} at the end"
    steps = []
    for step, causes in outcome.history.alarms_outside.items():
        if not set(causes).isdisjoint(lasting):
            steps.append(step)
    if steps:
        text += f", since its first alarm at step {min(steps):.0f}"
    return text


def _state(outcome: RunOutcome) -> Iterator[str]:
    if not outcome.nonfinite_saves:
        return
    step, arrays = outcome.nonfinite_saves[0]
    number = len(outcome.nonfinite_saves)
    saves = f"the checkpoint of step {step}"
    if number > 1:
        saves = f"{number} checkpoints since {step}"
    yield f"NaN or Inf in {first_of(arrays, _SHOWN)}, in {saves}."
    last_step, _ = outcome.nonfinite_saves[-1]
    if last_step == outcome.step:
        yield "The run ends in that state."


def _tried(outcome: RunOutcome) -> Iterator[str]:
    if outcome.history.observes:
        yield "nothing: the policy only observes."
        return
    phrases = interventions(outcome)
    if outcome.history.rollbacks:
        phrases.append(f"rolled back {_times(len(outcome.history.rollbacks))}")
    phrases += _undone_tries(outcome)
    if outcome.steps_lost:
        phrases.append(lost_steps_text(outcome))
    if phrases:
        text = "; ".join(phrases)
        if outcome.ending == Ending.KILLED:
            text += " (at least: the last steps may not have reached the files)"
        yield f"{text}."


def _list_faults(outcome: RunOutcome) -> list[str]:
    """The paragraph about the faults of a run: its lines, or nothing without a fault."""
    faults = faults_found(outcome.history)
    if not faults:
        return []
    # If a run has many faults, the list has the faults with a remedy first, then the newest faults.
    important = sorted(faults, key=lambda fault: (fault.has_remedy, fault.first))[-_MAX_FAULTS:]
    lines = ["Faults found:"]
    for fault in faults:
        if fault in important:
            lines.append(_wrapped(fault.text, first="  - ", then="    "))
    rest = [fault for fault in faults if fault not in important]
    if rest:
        line = f"  - and {len(rest):,} more"
        if not any(fault.has_remedy for fault in rest):
            line += ", which changed nothing"
        lines.append(line)
    return lines


def _times(number: int) -> str:
    """A number of times as text: "once", "2 times"."""
    if number == 1:
        return "once"
    return f"{number:,} times"


def _undone_tries(outcome: RunOutcome) -> list[str]:
    """A phrase about the tries that were undone, or nothing without such a try."""
    number = outcome.history.undone_tries
    if not number:
        return []
    return [f"undid {counted(number, 'try', 'tries')}"]


def interventions(outcome: RunOutcome) -> list[str]:
    """Lists what was done in a run, except rollbacks.

    Batches and limits of tries that were undone are not listed: the final weights do not depend
    on them. Skipped and clipped steps cannot be told apart, so their phrases say so.

    Args:
        outcome: how the run has ended.

    Returns:
        A phrase for each kind of intervention, for example "skipped 3 steps". If the policy
        observes, the phrases say what it would have done.
    """
    counts, history = outcome.counts, outcome.history
    with_undone = ""
    if history.undone_tries:
        with_undone = " (undone steps included)"
    phrases: list[str] = []
    if counts.skips:
        phrases.append(f"skipped {counted(counts.skips, 'step')}{with_undone}")
    batches = sum(len(event.batches or ()) for event in history.rollbacks_in_force)
    if batches:
        phrases.append(f"skipped {counted(batches, 'batch', 'batches')} after a rollback")
    if counts.clips:
        phrases.append(f"clipped {counted(counts.clips, 'step')}{with_undone}")
    # The engine counts a limit as a cut. After another rollback it may have forgotten the limit.
    limits = sum(event.lr_limit is not None for event in history.rollbacks)
    limits = min(limits, counts.lr_cuts)
    if counts.lr_cuts > limits:
        phrases.append(f"cut the learning rate {_times(counts.lr_cuts - limits)}")
    in_force = sum(event.lr_limit is not None for event in history.rollbacks_in_force)
    if min(limits, in_force):
        phrases.append(f"limited the learning rate {_times(min(limits, in_force))}")
    for answer, phrase in _ANSWERS.items():
        number = outcome.history.answers[answer]
        if number:
            phrases.append(phrase.format(_times(number)))
    if outcome.history.declined:
        rollbacks = counted(outcome.history.declined, "rollback")
        phrases.append(f"declined {rollbacks} that a rule asked for")
    if outcome.lr_scale < 1 and not outcome.history.observes:
        phrases.append(f"learning rate × {outcome.lr_scale:.3g} at the end")
    return phrases


_ANSWERS = {
    "shrink_microbatch": "split the batch {} when memory ran out",
    "skip_batch": "skipped an unreadable batch {}",
    "retry": "repeated a network call {}",
}
"""Response to a fault -> phrase with a count."""


def advice(cause: Cause, *, rollbacks: int = 0) -> list[str]:
    """Collects what a person should look at.

    Args:
        cause: causes of the trouble.
        rollbacks: rollbacks of the run. After several of them, another rollback does not help.

    Returns:
        The diagnosis of each cause, in the order of `FAILURES`.
    """
    hints = [row.diagnosis for flag, row in FAILURES.items() if flag in cause]
    if cause & ~_FAULTS and rollbacks > 1:
        hints.append(_REPEATED)
    return hints


def _no_good_checkpoint(outcome: RunOutcome) -> str:
    text = "none" + why_no_good_checkpoint(outcome.step, outcome.probation)
    if outcome.ending == Ending.COMPLETED:
        return f"{text}."
    if outcome.counts.incidents or outcome.nonfinite_saves:
        return f"{text}; resume from the start, or check a checkpoint by hand."
    text += "; the run had no incident: the next start resumes from the newest checkpoint on disk"
    return f"{text}, if any."


def why_no_good_checkpoint(step: int, probation: int | None) -> str:
    """Explains why no checkpoint is known-good.

    Args:
        step: optimizer steps done.
        probation: healthy steps after which a checkpoint is known-good, or None if unknown.

    Returns:
        The reason, as text that begins with a colon, or an empty string if it is unknown. A run
        that was too short gets a setting that fits its length.
    """
    if probation is None:
        return ""
    text = f": a checkpoint is known-good after {probation} healthy steps (rollback.probation)"
    if step > probation:
        return text
    text += f", and the run has had {step}"
    if step < 2:
        return text
    return f'{text}. For short runs: rollback={{"probation": {step // 2}}}'


def last_line(outcome: RunOutcome, newest: int | None) -> str:
    """Writes the last line of a run on the console.

    Args:
        outcome: how the run has ended.
        newest: step of the newest checkpoint on disk, or None without one.

    Returns:
        The line, for example "completed after step 500: skipped 1 step; newest known-good
        checkpoint: step 300".
    """
    how = STATES[RunState(outcome.ending)]
    after = f" after step {outcome.step}"
    if outcome.ending == Ending.COMPLETED and outcome.steps_skipped:
        after += f" of {outcome.step + outcome.steps_skipped}"
    if outcome.ending == Ending.REQUESTED:
        how = f"ended by {outcome.why}"
    elif outcome.ending == Ending.STOPPED:
        how += f" ({outcome.why})"
    elif outcome.ending == Ending.EXCEPTION and outcome.why:
        how = f"ended incomplete ({outcome.why})"
        after = ""  # the Healer may not have counted the steps
    phrases = interventions(outcome)
    if outcome.counts.rollbacks:
        phrases.append(f"rolled back {_times(outcome.counts.rollbacks)}")
    phrases += _undone_tries(outcome)
    if outcome.history.observes:
        phrases = [f"would have {phrase}" for phrase in phrases]
    if outcome.unrepaired:
        after += f": {unrepaired_text(outcome.unrepaired)}; "
    else:
        after += ": "
    text = f"{how}{after}{', '.join(phrases) or 'no intervention'}"
    if outcome.history.alerts and not outcome.counts.rollbacks:  # a rollback may have healed them
        text += f"; {counted(outcome.history.alerts, 'alert')} changed nothing"
    if outcome.history.observes and phrases:
        text += " (without the changes, one fault may cause many of these steps)"
    if outcome.history.observes and outcome.compares is False:
        text += '; "observe" compares no weights, so it names no rollback to better weights'
    if outcome.counts.dropped:
        text += f"; the loss scale skipped {counted(outcome.counts.dropped, 'step')}"
    if outcome.steps_lost:
        text += f"; {lost_steps_text(outcome)}"
    checkpoints: list[str] = []
    if newest is not None:
        checkpoints.append(f"checkpoint {newest} is on disk")
    ends_healthy = outcome.ending == Ending.COMPLETED and not outcome.open
    if not ends_healthy or outcome.nonfinite_saves:  # somebody may need an earlier checkpoint
        if outcome.last_good is not None:
            checkpoints.append(f"newest known-good checkpoint: step {outcome.last_good}")
        elif outcome.open or outcome.nonfinite_saves or outcome.ending == Ending.STOPPED:
            checkpoints.append("no checkpoint is known-good")
    if checkpoints:
        text += f"; {', '.join(checkpoints)}"
    return text


def lost_steps_text(outcome: RunOutcome) -> str:
    """A clause about the steps that rollbacks have undone and that were not repeated."""
    total = outcome.step + outcome.steps_lost
    text = f"{outcome.steps_lost:,} of {total:,} steps were not repeated"
    if outcome.why_lost:
        text += f", because {outcome.why_lost}"
    return text


def _wrapped(text: str, *, first: str = "", then: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )
