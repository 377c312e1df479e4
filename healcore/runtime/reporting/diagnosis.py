"""Writes the diagnosis of a run's end, live or killed: a list of findings, and the last line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healcore.console import counted, first_of
from healcore.core.decision import Cause, names_of
from healcore.events.kinds import batch_names, flags_text, readings_text
from healcore.events.models import Ending
from healcore.history import RunState
from healcore.runtime.faults.failures import FAILURES, causes_of
from healcore.runtime.reporting.faults_found import faults_found
from healcore.runtime.reporting.run_outcome import RunOutcome

_WIDTH = 96
_SHOWN = 5
_MAX_FAULTS = 10  # limit of the faults that a diagnosis lists

_FAULTS = Cause.OOM | Cause.DATA | Cause.NETWORK | Cause.HANG | Cause.UNKNOWN | Cause.WORKER
"""Causes of exceptions. A rollback is not a response to them."""

AFTER_A_KILL = (
    "look for the out-of-memory killer (dmesg), the scheduler's time limit or preemption, and the "
    "machine's own log"
)
"""Advice about a process that was killed."""

UNREPAIRED = (
    "healcore could not repair the damage. Check the learning rate, the data and what writes the "
    "weights at the step where the damage begins. If the program makes this change on purpose, "
    "nothing is wrong. (docs/how-it-decides.md)"
)
"""Advice about damage that was not repaired."""

_REPEATED = (
    "Rolling back did not help: more of the data is bad than was skipped, the learning rate is too "
    "high, or the cause is the model, its precision or its optimizer's settings, or is older than "
    "the checkpoints. (docs/lost-run.md)"
)
"""Advice after several rollbacks."""

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


class Finding(NamedTuple):
    """What a person should know about the end of a run, as one entry of the diagnosis."""

    label: str
    """What the text is about: "Seen", "Fault", "Tried", "Check", ..."""
    text: str
    """The finding, at its end the page that explains it."""


def explain(outcome: RunOutcome) -> str:
    """Writes the diagnosis for a person: a headline, then the findings.

        The program raised an exception at step 412: ValueError: ...
        Seen: loss spike from step 398 on; loss 9.1 (limit 4); epoch 0 batch 398
        Fault: step 240: nonfinite loss. Skipped 1 step.
        Fault: steps 398 to 411: loss spike. Skipped 1 step.
        Tried: skipped 2 steps
        Check: The loss rose far above its level. ... (docs/faults.md#loss_spike)
        Last known-good: the checkpoint of step 300, in runs/7/step-300

    Args:
        outcome: how the run has ended.

    Returns:
        The text, in lines of at most 96 characters except for paths.
    """
    because = outcome.why
    if outcome.ending == Ending.EXCEPTION:
        because = outcome.exception
    at = f"at step {outcome.step}: {because}" if because else f"at step {outcome.step}"
    headline = _HEADLINES[Ending(outcome.ending)].format(at)
    if outcome.ending in (Ending.EXCEPTION, Ending.KILLED):
        headline = _wrapped(headline)
    lines = [headline]
    for label, text in findings(outcome):
        line = f"{label}: {text}"
        if label != "Last known-good":  # whose path stays on one line
            line = _wrapped(line)
        lines.append(line)
    return "\n".join(lines)


def findings(outcome: RunOutcome) -> Iterator[Finding]:
    """Finds out what a person should know about the end of a run.

    Args:
        outcome: how the run has ended.

    Yields:
        The findings, in the order of the diagnosis. What is not known has none.
    """
    history = outcome.history
    assessments = history.of("assessment")
    if outcome.unrepaired:
        why = [each.why for each in assessments if each.verdict == "accepted" and each.why]
        yield Finding("Not healed", ": ".join([unrepaired_text(outcome.unrepaired), *why[-1:]]))
    recovered = [each for each in assessments if each.verdict == "recovered" and each.why]
    if recovered:
        text = recovered_text([each.onset or 0 for each in recovered])
        yield Finding("Recovered", f"{text}: {recovered[-1].why}")
    seen = _seen(outcome)
    if seen:
        yield Finding("Seen", "; ".join(seen))
    if outcome.nonfinite_saves:
        step, arrays = outcome.nonfinite_saves[0]
        saves = counted(len(outcome.nonfinite_saves), "checkpoint")
        text = f"NaN or Inf in {first_of(arrays, _SHOWN)}, in {saves} since step {step}"
        if outcome.nonfinite_saves[-1][0] == outcome.step:
            text += ". The run ends in that state"
        yield Finding("State", text)
    yield from _faults(outcome)
    tried = interventions(outcome)
    if history.observes:
        tried = ["nothing: the policy only observes"]
    if outcome.steps_lost:
        tried.append(lost_steps_text(outcome))
    if tried:
        at_least = " (at least)" if outcome.ending == Ending.KILLED else ""
        yield Finding("Tried", "; ".join(tried) + at_least)
    for hint in _hints(outcome):
        yield Finding("Check", hint)
    yield Finding("Last known-good", _last_good(outcome))


def _faults(outcome: RunOutcome) -> Iterator[Finding]:
    """The faults of a run. Of many faults those with a remedy come first, then the newest ones."""
    faults = faults_found(outcome.history)
    chosen = sorted(faults, key=lambda fault: (fault.has_remedy, fault.first))[-_MAX_FAULTS:]
    for fault in faults:
        if fault in chosen:
            yield Finding("Fault", fault.text)
    if len(faults) > len(chosen):
        yield Finding("Fault", f"and {len(faults) - len(chosen):,} more")


def _hints(outcome: RunOutcome) -> list[str]:
    """Collects the advice for a person, about this run first, then about its causes."""
    history, last = outcome.history, outcome.history.last_incident
    # Of alarms about which nothing was done: only a person can act on them.
    cause = outcome.lasting
    for names in history.alarms_outside(undone=False).values():
        cause |= causes_of(names)
    hints = [UNREPAIRED] if outcome.unrepaired else []
    healthy = outcome.ending == Ending.COMPLETED and not outcome.open
    if healthy and not outcome.nonfinite_saves and not outcome.fault:
        return hints or advice(cause)
    cause |= outcome.cause | outcome.fault
    if last is not None and last.diagnosis:
        hints.append(last.diagnosis)
        cause &= ~Cause.NONFINITE_GRAD  # the gradients were finite
    return hints + advice(cause, rollbacks=len(history.rollbacks))


def advice(cause: Cause, *, rollbacks: int = 0) -> list[str]:
    """Collects what a person should look at.

    Args:
        cause: causes of the trouble.
        rollbacks: rollbacks of the run. After several of them, another rollback does not help.

    Returns:
        The diagnosis of each cause and the page about it, in the order of `FAILURES`.
    """
    hints: list[str] = []
    for flag, row in FAILURES.items():
        if flag in cause:
            hints.append(f"{row.diagnosis} (docs/faults.md#{row.name})")
    if cause & ~_FAULTS and rollbacks > 1:
        hints.append(_REPEATED)
    return hints


# -- clauses --------------------------------------------------------------------------------------


def _seen(outcome: RunOutcome) -> list[str]:
    """What was seen of the last incident, and which cause lasts."""
    last, clauses = outcome.history.last_incident, []
    if outcome.lasting:
        clauses.append(lasting_text(outcome))
    if last is None:
        return clauses
    text = f"{flags_text(last.cause)} from step {last.onset_step:.0f} on"
    if last.over or outcome.open is False:
        text += ", resolved by the end"
    clauses.append(text)
    if last.readings is not None:
        clauses.append(readings_text(last.readings, last.cause))
    if last.evidence:
        norms = [f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in last.evidence]
        clauses.append(f"unusual gradients: {first_of(norms, _SHOWN)}")
    clauses.append(first_of(batch_names(last.batches, last.rows), _SHOWN))
    if outcome.counts.incidents > 1:
        clauses.append(f"{outcome.counts.incidents} incidents in all")
    return [clause for clause in clauses if clause]


def lasting_text(outcome: RunOutcome) -> str:
    """Describes the lasting causes at the end of a run.

    Args:
        outcome: how the run has ended; `lasting` is not empty.

    Returns:
        A clause, for example "plateau at the end, since its first alarm at step 800".
    """
    lasting = names_of(outcome.lasting)
    text = f"{flags_text(lasting)} at the end"
    for step, causes in outcome.history.alarms_outside().items():
        if not set(causes).isdisjoint(lasting):
            return f"{text}, since its first alarm at step {step:.0f}"
    return text


def unrepaired_text(onsets: Sequence[int]) -> str:
    """Describes damage that was not repaired, by the steps at which it begins (at least one)."""
    return f"damage since {_steps_of(onsets)} was not repaired"


def recovered_text(onsets: Sequence[int]) -> str:
    """Describes accepted damage from which the run has recovered, by the steps of its onset."""
    return f"nothing is left of the damage since {_steps_of(onsets)}"


def _steps_of(onsets: Sequence[int]) -> str:
    """Names some steps, for example "step 7" or "steps 7, 19"."""
    steps = first_of([str(onset) for onset in onsets], _SHOWN)
    return f"step {steps}" if len(onsets) == 1 else f"steps {steps}"


def lost_steps_text(outcome: RunOutcome) -> str:
    """A clause about the steps that rollbacks have undone and that were not repeated."""
    total = outcome.step + outcome.steps_lost
    text = f"{outcome.steps_lost:,} of {total:,} steps were not repeated"
    return f"{text}, because {outcome.why_lost}" if outcome.why_lost else text


def interventions(outcome: RunOutcome) -> list[str]:
    """Lists what was done in a run.

    Args:
        outcome: how the run has ended.

    Returns:
        A phrase for each kind of intervention, for example "skipped 3 steps".
    """
    counts, history = outcome.counts, outcome.history
    # The changes for damage that was not repaired are undone.
    rollbacks = [each for each in history.rollbacks if each.onset not in outcome.unrepaired]
    answers = history.answers
    # The engine counts a limit as a cut. After another rollback it may have forgotten the limit.
    limits = min(sum(event.lr_limit is not None for event in rollbacks), counts.lr_cuts)
    done = (
        (counts.skips, "skipped {step}"),
        (sum(len(event.batches or ()) for event in rollbacks), "skipped {batch} after a rollback"),
        (counts.clips, "clipped {step}"),
        (counts.lr_cuts - limits, "cut the learning rate {times}"),
        (limits, "limited the learning rate {times}"),
        (answers["shrink_microbatch"], "split the batch {times} when memory ran out"),
        (answers["skip_batch"], "skipped an unreadable batch {times}"),
        (answers["retry"], "repeated a network call {times}"),
        (history.declined, "declined {rollback} that a rule asked for"),
        (counts.rollbacks, "rolled back {times}"),
    )
    phrases: list[str] = []
    for number, phrase in done:
        if number:
            words = {
                "step": counted(number, "step"),
                "batch": counted(number, "batch", "batches"),
                "rollback": counted(number, "rollback"),
                "times": "once" if number == 1 else f"{number:,} times",
            }
            phrases.append(phrase.format_map(words))
    if outcome.lr_scale < 1 and not history.observes:
        phrases.append(f"learning rate × {outcome.lr_scale:.3g} at the end")
    return phrases


def _last_good(outcome: RunOutcome) -> str:
    step = outcome.last_good
    if step is None:
        return f"none{why_no_good_checkpoint(outcome.probation)}"
    text = f"the checkpoint of step {step}"
    if outcome.unrepaired and step > outcome.unrepaired[0]:
        text += " (saved after the damage began, so its weights may be damaged)"
    if outcome.last_good_path:
        text += f", in {outcome.last_good_path}"
    return text


def why_no_good_checkpoint(probation: int | None) -> str:
    """Explains why no checkpoint is known-good.

    Args:
        probation: healthy steps after which a checkpoint is known-good, or None if unknown.

    Returns:
        The reason, as text that begins with a colon, or an empty string if it is unknown.
    """
    if probation is None:
        return ""
    return f": known-good after {probation} healthy steps (rollback.probation, docs/checkpoints.md)"


def last_line(outcome: RunOutcome, newest: int | None) -> str:
    """Writes the last line of a run on the console.

    Args:
        outcome: how the run has ended.
        newest: step of the newest checkpoint on disk, or None without one.

    Returns:
        The line, for example "completed after step 500: skipped 1 step; checkpoint 500 is on disk".
    """
    history, completed = outcome.history, outcome.ending == Ending.COMPLETED
    text = f"{STATES[RunState(outcome.ending)]} after step {outcome.step}"
    if completed and outcome.steps_skipped:
        text += f" of {outcome.step + outcome.steps_skipped}"
    elif outcome.ending == Ending.REQUESTED:
        text = f"ended by {outcome.why} after step {outcome.step}"
    elif outcome.ending == Ending.STOPPED:
        text = f"stopped by the policy ({outcome.why}) after step {outcome.step}"
    elif outcome.ending == Ending.EXCEPTION and outcome.why:
        text = f"ended incomplete ({outcome.why})"  # the Healer may not have counted the steps
    phrases = interventions(outcome)
    if history.observes:
        phrases = [f"would have {phrase}" for phrase in phrases]
    clauses = [", ".join(phrases) or "no intervention"]
    if outcome.unrepaired:
        clauses.insert(0, unrepaired_text(outcome.unrepaired))
    if history.alerts and not outcome.counts.rollbacks:  # a rollback may have healed them
        clauses.append(f"{counted(history.alerts, 'alert')} changed nothing")
    if outcome.counts.dropped:
        clauses.append(f"the loss scale skipped {counted(outcome.counts.dropped, 'step')}")
    if outcome.steps_lost:
        clauses.append(lost_steps_text(outcome))
    if newest is not None:
        clauses.append(f"checkpoint {newest} is on disk")
    if not completed or outcome.open or outcome.nonfinite_saves:  # an earlier one may be needed
        if outcome.last_good is not None:
            clauses.append(f"newest known-good checkpoint: step {outcome.last_good}")
        elif outcome.open or outcome.nonfinite_saves or outcome.ending == Ending.STOPPED:
            clauses.append("no checkpoint is known-good")
    return f"{text}: {'; '.join(clauses)}"


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
