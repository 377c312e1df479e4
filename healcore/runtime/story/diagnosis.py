"""Writes the diagnosis of a run's end, live or killed: observations, actions and advice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from healcore.console import counted, first_of, listed
from healcore.core.decision import Cause, StepRecord, names
from healcore.events.models import Ending
from healcore.events.schema import batch_names, flag_names, readings_text, sentence
from healcore.history import Counts, Incident, Mode, Run, RunState
from healcore.runtime.faults.failures import FAILURES, causes_of

_WIDTH = 96
_SHOWN = 5
_MOST_FAULTS = 10  # limit of the faults that a diagnosis lists
_QUIET_STEPS = 10  # alarms of one cause with fewer steps between them are one fault

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


class RunEnd(NamedTuple):
    """How a run has ended, and what is known about it at that time.

    A live run makes it at its end. After a kill the next start makes it from the files, so several
    fields may be unknown.
    """

    run: Run  # the run by its events
    ending: str  # one of `Ending`
    step: int  # optimizer steps done
    counts: Counts  # counts of the whole run; lower limits if the run was killed
    why: str = ""  # reason of a stop, or name of the signal
    exception: str | None = None  # the exception in one line, or None without an exception
    fault: Cause = Cause(0)  # cause of the exception, or 0 without an exception
    hint: str = ""  # `Fault.hint` of the exception
    open: bool | None = None
    """Whether the last incident was open or the last step unhealthy, or None if unknown."""
    lasting: Cause = Cause(0)  # lasting causes of the last step, such as a plateau
    lr_scale: float = 1.0
    last_good: int | None = None  # step of the newest known-good checkpoint, or None without one
    last_good_path: str | None = None  # directory of the checkpoint `last_good`
    probation: int | None = None
    """Healthy steps after which a checkpoint is known-good, or None if unknown."""
    nonfinite_saves: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Step and array names of each checkpoint with disallowed NaN or Inf."""
    metrics: Mapping[str, float] = MappingProxyType({})  # `Healer.metrics` at the end
    steps_lost: int = 0
    """Steps that rollbacks have undone and that were not repeated: the data was not rewound."""
    why_lost: str = ""  # why the data was not rewound, or empty if no step is lost

    @property
    def cause(self) -> Cause:
        """Cause of the last incident, or 0 without an incident."""
        last = self.run.last_incident
        if last is None:
            return Cause(0)
        return causes_of(last.cause)


_HEADLINES = {
    Ending.COMPLETED: "The run is complete {}.",
    Ending.STOPPED: "healcore stopped the run {}.",
    Ending.EXCEPTION: "The training loop raised an exception {}",
    Ending.SIGNAL: "The run was ended from outside {}.",
    Ending.REQUESTED: "The run was ended on request {}.",
    Ending.INTERRUPTED: "The run was interrupted from the keyboard {}.",
    Ending.KILLED: "The process was killed without notice; its last record is {}. It could not "
    f"record why: {AFTER_A_KILL}.",
}


def explain(end: RunEnd) -> str:
    """Writes the diagnosis for a person: a headline, then paragraphs with a label.

        The training loop raised an exception at step 412: ValueError: ...
        Seen: loss spike from step 398 on. At the first alarm: loss 9.1 (limit 4).
        Faults found:
          - step 240: nonfinite loss. Skipped 1 step.
          - steps 398 to 411: loss spike. Skipped 1 step.
        Tried: skipped 2 steps.
        Look at:
          - The loss rose far above its level and stayed high: ...
        Last known-good: the checkpoint of step 300, in runs/7/step-300.

    Args:
        end: how the run has ended.

    Returns:
        The text, in lines of at most 96 characters except for paths. Paragraphs about which there
        is nothing to say are absent.
    """
    parts = [_headline(end)]
    for label, sentences in (("Seen", _seen), ("State", _state), ("Tried", _tried)):
        if label == "Tried":
            parts += _list_faults(end)
        text = " ".join(sentences(end))
        if text:
            parts.append(_wrapped(text, first=f"{label}: ", then="  "))
    if end.ending != Ending.COMPLETED or end.open or end.nonfinite_saves or end.fault:
        hints = _hints(end)
        if hints:
            parts.append("Look at:")
        for hint in hints:
            parts.append(_wrapped(hint, first="  - ", then="    "))
    parts.append(_last_good(end))
    return "\n".join(parts)


def _headline(end: RunEnd) -> str:
    because = end.why
    if end.ending == Ending.EXCEPTION:
        because = end.exception
    at = f"at step {end.step}"
    if because:
        at += f": {because}"
    headline = _HEADLINES[Ending(end.ending)].format(at)
    if end.ending in (Ending.EXCEPTION, Ending.KILLED):
        return _wrapped(headline)
    return headline


def _hints(end: RunEnd) -> list[str]:
    """What to look at: the most special advice first."""
    hints: list[str] = []
    cause = end.cause
    if end.hint:
        hints.append(end.hint)
    last = end.run.last_incident
    if last is not None and last.diagnosis:
        hints.append(last.diagnosis)
        cause &= ~Cause.NONFINITE_GRAD  # the gradients were finite
    cause |= end.lasting
    if not end.hint:  # a hint is about this exception, the advice about all of the same cause
        cause |= end.fault
    return hints + advice(cause, rollbacks=len(end.run.rollbacks))


def _last_good(end: RunEnd) -> str:
    if end.last_good is None:
        return _wrapped(_no_good_checkpoint(end), first="Last known-good: ", then="  ")
    text = f"Last known-good: the checkpoint of step {end.last_good}"
    if end.last_good_path:
        text += f", in {end.last_good_path}"
    return f"{text}."  # not wrapped: a path stays on one line


def _seen(end: RunEnd) -> Iterator[str]:
    last = end.run.last_incident
    if end.lasting:
        yield f"{lasting_text(end)}."
    total = counted(end.counts.incidents, "incident")
    if last is None:
        if end.counts.incidents:
            yield f"{total}, all resolved."
        return
    text = f"{flag_names(last.cause)} from step {last.onset_step:.0f} on"
    if last.over or end.open is False:
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
    if end.counts.incidents > 1:
        yield f"The run had {total}."


def lasting_text(end: RunEnd) -> str:
    """Describes the lasting causes at the end of a run.

    Args:
        end: how the run has ended; `lasting` is not empty.

    Returns:
        A clause, for example "plateau at the end, since its first alarm at step 800".
    """
    lasting = names(end.lasting)
    text = f"{flag_names(lasting)} at the end"
    steps = []
    for step, causes in end.run.alarms_outside.items():
        if not set(causes).isdisjoint(lasting):
            steps.append(step)
    if steps:
        text += f", since its first alarm at step {min(steps):.0f}"
    return text


def _state(end: RunEnd) -> Iterator[str]:
    if not end.nonfinite_saves:
        return
    step, arrays = end.nonfinite_saves[0]
    number = len(end.nonfinite_saves)
    saves = (
        f"the checkpoint of step {step}" if number == 1 else f"{number} checkpoints since {step}"
    )
    yield f"NaN or Inf in {first_of(arrays, _SHOWN)}, in {saves}."
    last_step, _ = end.nonfinite_saves[-1]
    if last_step == end.step:
        yield "The run ends in that state."


def _tried(end: RunEnd) -> Iterator[str]:
    if end.run.observes:
        yield "nothing: the policy only observes."
        return
    phrases = interventions(end)
    if end.run.rollbacks:
        phrases.append(f"rolled back {_times(len(end.run.rollbacks))}")
    if end.steps_lost:
        phrases.append(lost_steps_text(end))
    if phrases:
        yield f"{'; '.join(phrases)}."


def _list_faults(end: RunEnd) -> list[str]:
    """The paragraph about the faults of a run: its lines, or nothing without a fault."""
    faults = faults_found(end.run)
    if not faults:
        return []
    # Of many faults those with a remedy are listed, and the newest ones.
    important = sorted(faults, key=lambda fault: (fault.has_remedy, fault.first))[-_MOST_FAULTS:]
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


class FaultFound(NamedTuple):
    """A fault of a run: an incident, alarms that changed nothing, or an exception with an answer.

    Attributes:
        first: its first step.
        has_remedy: whether the policy did something about it.
        text: what it was, the remedy, and the steps that it cost.
    """

    first: float
    has_remedy: bool
    text: str


def faults_found(run: Run) -> list[FaultFound]:
    """Lists the faults of a run with the remedy of each and the steps that it cost.

    Args:
        run: the run by its events. It has at most 1,000 alarms outside of incidents, and the newest
            20 exceptions.

    Returns:
        The faults in the order of their first step.
    """
    faults: list[FaultFound] = []
    for incident in run.incidents:
        where = _steps_text(incident.onset_step, incident.end)
        remedies = _remedies(incident)
        undone_by = _undone_by(run, incident.onset_step)
        if incident.undone and undone_by and not incident.rolled_back:
            remedies.append(undone_by)
        remedy = ". ".join(remedies) or "Training continued"
        text = f"{where}: {incident_cause_text(incident)}. {remedy}."
        faults.append(FaultFound(incident.onset_step, bool(remedies), text))
    for first, last, causes in _alarms_outside(run):
        remedy = _undone_by(run, first) or "No remedy: an alarm alone changes nothing"
        text = f"{_steps_text(first, last)}: {flag_names(causes)}. {remedy}."
        faults.append(FaultFound(first, False, text))
    for event in run.newest["fault"]:
        if event.answer in (None, "save"):  # the exception ended the run, as the headline says
            continue
        step = float(event.step or 0)
        text = f"{_steps_text(step, step)}: {sentence(event).removeprefix('fault: ')}."
        faults.append(FaultFound(step, True, text))
    return sorted(faults, key=lambda fault: fault.first)


def _undone_by(run: Run, step: float) -> str:
    """The rollback that has undone a step, as a sentence without full stop, or an empty string."""
    for event in run.rollbacks:
        if event.step is not None and (event.checkpoint or 0) <= step < event.step:
            return f"Undone by the rollback from step {event.step}"
    return ""


def _alarms_outside(run: Run) -> list[tuple[float, float, tuple[str, ...]]]:
    """First step, last step and causes of the alarms outside of incidents, close alarms as one."""
    found: list[tuple[float, float, tuple[str, ...]]] = []
    for step, causes in sorted(run.alarms_outside.items()):
        if found:
            first, last, before = found[-1]
            if before == causes and step - last <= _QUIET_STEPS:
                found[-1] = (first, step, causes)
                continue
        found.append((step, step, causes))
    return found


def _steps_text(first: float, last: float) -> str:
    """A range of steps as text: "step 7" or "steps 7 to 12"."""
    if first == last:
        return f"step {first:.0f}"
    return f"steps {first:.0f} to {last:.0f}"


_FOUND_BY = {
    "earlier_weights": "worse weights, found by comparison",
    "nonfinite_steps": "no finite step any more",
    "intended_numbers": "a change that the program makes on purpose",
}
"""`EventRecord.by` of a rollback without an alarm -> what was wrong."""


def incident_cause_text(incident: Incident) -> str:
    """Describes what was wrong in an incident.

    Args:
        incident: the incident, or a rollback without an alarm.

    Returns:
        Its causes, such as "nonfinite loss". Without an alarm, why the run was rolled back.
    """
    if incident.cause:
        return flag_names(incident.cause)
    if incident.number:
        return "unknown cause"
    by = ""
    for event in incident.responses:
        by = by or event.by or ""
    return _FOUND_BY.get(by, "a rollback that a hook ordered")


def _remedies(incident: Incident) -> list[str]:
    """What was done about an incident, as sentences without their full stop."""
    phrases: list[str] = []
    if incident.skipped:
        steps = counted(incident.skipped, "step")
        if incident.capped:
            steps += " or more"
        phrases.append(f"skipped {steps}")
    for event in incident.responses:
        if event.kind != "stop":  # the headline has its reason
            phrases.append(sentence(event))
    if incident.mode is Mode.OBSERVE:
        phrases = [f"only observed: {phrase}" for phrase in phrases]
    return [phrase[:1].upper() + phrase[1:] for phrase in phrases]


def _times(number: int) -> str:
    """A number of times as text: "once", "2 times"."""
    if number == 1:
        return "once"
    return f"{number:,} times"


def interventions(end: RunEnd) -> list[str]:
    """Lists what was done in a run, except rollbacks.

    Args:
        end: how the run has ended.

    Returns:
        A phrase for each kind of intervention, for example "skipped 3 steps". If the policy
        observes, the phrases say what it would have done.
    """
    counts = end.counts
    phrases: list[str] = []
    if counts.skips:
        phrases.append(f"skipped {counted(counts.skips, 'step')}")
    batches = sum(len(event.batches or ()) for event in end.run.rollbacks)
    if batches:
        phrases.append(f"skipped {counted(batches, 'batch', 'batches')} after a rollback")
    if counts.clips:
        phrases.append(f"clipped {counted(counts.clips, 'step')}")
    if counts.lr_cuts:
        phrases.append(f"cut the learning rate {_times(counts.lr_cuts)}")
    for answer, phrase in _ANSWERS.items():
        number = end.run.answers[answer]
        if number:
            phrases.append(phrase.format(_times(number)))
    if end.run.declined:
        rollbacks = counted(end.run.declined, "rollback")
        phrases.append(f"declined {rollbacks} that a rule asked for")
    if end.lr_scale < 1 and not end.run.observes:
        phrases.append(f"learning rate × {end.lr_scale:.3g} at the end")
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


def _no_good_checkpoint(end: RunEnd) -> str:
    text = "none" + why_no_good_checkpoint(end.step, end.probation)
    if end.ending == Ending.COMPLETED:
        return f"{text}."
    if end.counts.incidents or end.nonfinite_saves:
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


def last_line(end: RunEnd, newest: int | None) -> str:
    """Writes the last line of a run on the console.

    Args:
        end: how the run has ended.
        newest: step of the newest checkpoint on disk, or None without one.

    Returns:
        The line, for example "completed after step 500: skipped 1 step; newest known-good
        checkpoint: step 300".
    """
    how = STATES[RunState(end.ending)]
    if end.ending == Ending.REQUESTED:
        how = f"ended by {end.why}"
    elif end.ending == Ending.STOPPED:
        how += f" ({end.why})"
    phrases = interventions(end)
    if end.counts.rollbacks:
        phrases.append(f"rolled back {_times(end.counts.rollbacks)}")
    if end.run.observes:
        phrases = [f"would have {phrase}" for phrase in phrases]
    text = f"{how} after step {end.step}: {', '.join(phrases) or 'no intervention'}"
    if end.steps_lost:
        text += f"; {lost_steps_text(end)}"
    checkpoints: list[str] = []
    if newest is not None:
        checkpoints.append(f"checkpoint {newest} is on disk")
    if end.last_good is not None:
        checkpoints.append(f"newest known-good checkpoint: step {end.last_good}")
    elif end.open or end.nonfinite_saves or end.ending == Ending.STOPPED:
        # After a healthy end nobody needs an earlier checkpoint.
        checkpoints.append("no checkpoint is known-good")
    if checkpoints:
        text += f"; {', '.join(checkpoints)}"
    return text


def lost_steps_text(end: RunEnd) -> str:
    """A clause about the steps that rollbacks have undone and that were not repeated."""
    total = end.step + end.steps_lost
    text = f"{end.steps_lost:,} of {total:,} steps were not repeated"
    if end.why_lost:
        text += f", because {end.why_lost}"
    return text


FROM_START = 100
"""Steps after which a run ends that has had no finite step."""
IN_A_ROW = 1_000
"""Consecutive steps without a finite step after which any other run ends."""


def by_optimizer_text(numbers: Sequence[str]) -> str:
    """Explains a step whose gradients were finite, and whose update was not.

    Args:
        numbers: settings of the optimizer that may be the reason, from `Driver.suspect_numbers`.

    Returns:
        The diagnosis for a person.
    """
    text = "The optimizer made NaN or Inf of a finite gradient"
    if numbers:
        text += f": {listed(numbers)}"
    return (
        f"{text}. Look at its learning rate and schedule, and at its numbers in a small dtype: in "
        "bfloat16 a b2 of 0.999 is 1, in float16 an eps of 1e-8 is 0 "
        "(optax.inject_hyperparams takes hyperparam_dtype=jnp.float32)."
    )


def nonfinite_streak_text(
    record: StepRecord, row: int, weights: Sequence[str], from_start: bool
) -> str:
    """Describes a run of which many consecutive steps were not finite.

    Args:
        record: the last of these steps.
        row: number of these steps.
        weights: names of the parameters with NaN or Inf, in their order. A skip changes no
            parameter, so a run without a finite step has the parameters that it was started with.
        from_start: whether the run has had no finite step at all.

    Returns:
        A clause with the most likely reason: the weights, the training step, the optimizer, the
        gradient or the loss.
    """
    which = "first" if from_start else "last"
    since = " since the start" if from_start else ""
    text = f"none of the {which} {row:,} steps was finite, so nothing was trained"
    if weights:
        loaded = "loaded " if from_start else ""
        return f"{text}: the {loaded}weights are NaN or Inf; the first tensor is {weights[0]}"
    if not record.taken:
        return f"{text}: the training step has kept its old state{since}"
    if record.by_optimizer:
        return f"{text}: the gradients were finite, and the optimizer made NaN or Inf of them"
    signal = "loss" if record.cause & Cause.NONFINITE_LOSS else "gradient"
    text += f": the {signal} is NaN or Inf{since}"
    for tensor in record.evidence:
        if not math.isfinite(tensor.grad_norm):
            text += f"; the first tensor is the gradient of {tensor.name}"
            break
    return text + likely_cause_text(record)


def likely_cause_text(record: StepRecord | None) -> str:
    """Says where to look first after many steps whose loss was NaN or Inf.

    Args:
        record: the newest step that was not finite, or None without such a step.

    Returns:
        A clause that begins with a semicolon, or an empty string if the loss was finite.
    """
    if record is None or not record.cause & Cause.NONFINITE_LOSS:
        return ""
    return (
        "; look first for NaN or Inf in the inputs and labels, then for a division by 0 or a log "
        "of 0 in the loss"
    )


def _wrapped(text: str, *, first: str = "", then: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )
