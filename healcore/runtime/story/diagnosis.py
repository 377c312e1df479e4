"""Writes the diagnosis of a run's end, live or killed: observations, actions and advice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from healcore.console import counted, first_of, listed
from healcore.core.decision import Cause, StepRecord, names
from healcore.events.models import Ending
from healcore.events.schema import batch_names, flag_names, readings_text, sentence
from healcore.history import Counts, Run, RunState
from healcore.runtime.faults.failures import FAILURES, causes_of

_WIDTH = 96
_SHOWN = 5

_FAULTS = Cause.OOM | Cause.DATA | Cause.NETWORK | Cause.HANG | Cause.UNKNOWN | Cause.WORKER
"""Causes of exceptions. A rollback is no response to them."""

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
    """How a run has ended."""

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
        return Cause(0) if last is None else causes_of(last.cause)


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
    """The diagnosis: a headline, then paragraphs with a label."""
    because = end.exception if end.ending == Ending.EXCEPTION else end.why
    at = f"at step {end.step}{f': {because}' if because else ''}"
    headline = _HEADLINES[Ending(end.ending)].format(at)
    parts = [_wrapped(headline) if end.ending in (Ending.EXCEPTION, Ending.KILLED) else headline]
    sections = {"Seen": _seen, "State": _state, "Tried": _tried}
    for name, sentences in sections.items():
        if text := " ".join(sentences(end)):
            parts.append(_wrapped(text, first=f"{name}: ", then="  "))
    if end.ending != Ending.COMPLETED or end.open or end.nonfinite_saves or end.fault:
        # A hint is about this exception, the advice about all exceptions of its cause.
        fault = Cause(0) if end.hint else end.fault
        last, cause = end.run.last_incident, end.cause
        own = [last.diagnosis] if last is not None and last.diagnosis else []
        if own:
            cause &= ~Cause.NONFINITE_GRAD  # the gradients were finite
        hints = own + advice(cause | end.lasting | fault, rollbacks=len(end.run.rollbacks))
        hints = [end.hint, *hints] if end.hint else hints
        parts += ["Look at:"] if hints else []
        parts += [_wrapped(hint, first="  - ", then="    ") for hint in hints]
    where = f", in {end.last_good_path}" if end.last_good_path else ""
    good = f"Last known-good: the checkpoint of step {end.last_good}{where}."  # a path on one line
    if end.last_good is None:
        good = _wrapped(_no_good_checkpoint(end), first="Last known-good: ", then="  ")
    return "\n".join([*parts, good])


def _seen(end: RunEnd) -> Iterator[str]:
    last, counts = end.run.last_incident, end.counts
    if end.lasting:
        yield f"{lasting_text(end)}."
    total = counted(counts.incidents, "incident")
    if last is None:
        if counts.incidents:
            yield f"{total}, all resolved."
        return
    resolved = ", resolved by the end" if last.over or end.open is False else ""
    yield f"{', '.join(last.cause).lower()} from step {last.onset_step:.0f} on{resolved}."
    if last.readings is not None and (text := readings_text(last.readings, last.cause)):
        threshold = last.readings.threshold
        limit = f" (limit {threshold:.3g})" if threshold > 0 else ""
        yield f"At the first alarm: {text}{limit}."
    if last.evidence:
        norms = [f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in last.evidence]
        yield f"Unusual gradients: {first_of(norms, _SHOWN)}."
    if last.batches:
        yield f"Its data: {first_of(batch_names(last.batches, last.rows), _SHOWN)}."
    if counts.incidents > 1:
        yield f"The run had {total}."


def lasting_text(end: RunEnd) -> str:
    """The lasting causes at the end of a run, and their first alarm, as a clause."""
    lasting = {*names(end.lasting)}
    steps = [step for step, causes in end.run.alarms_outside.items() if lasting & {*causes}]
    first = f", since its first alarm at step {min(steps):.0f}" if steps else ""
    return f"{flag_names(names(end.lasting))} at the end{first}"


def _state(end: RunEnd) -> Iterator[str]:
    if not end.nonfinite_saves:
        return
    step, arrays = end.nonfinite_saves[0]
    many = len(end.nonfinite_saves)
    saves = f"the checkpoint of step {step}" if many == 1 else f"{many} checkpoints since {step}"
    yield f"NaN or Inf in {first_of(arrays, _SHOWN)}, in {saves}."
    if end.nonfinite_saves[-1][0] == end.step:
        yield "The run ends in that state."


def _tried(end: RunEnd) -> Iterator[str]:
    if end.run.observes:
        yield "nothing: the policy only observes."
        return
    rollbacks = [f"a rollback {sentence(event)}" for event in end.run.rollbacks[-_SHOWN:]]
    if earlier := len(end.run.rollbacks) - len(rollbacks):
        rollbacks.insert(0, counted(earlier, "earlier rollback"))
    lost = [lost_steps_text(end)] if end.steps_lost else []
    if done := "; ".join([*interventions(end), *rollbacks, *lost]):
        yield f"{done}."


def interventions(end: RunEnd) -> list[str]:
    """A phrase for each kind of intervention, except rollbacks."""
    counts, answers = end.counts, end.run.answers
    clips = counts.clips or 0
    batches = sum(len(each.batches or ()) for each in end.run.rollbacks)
    lowered = end.lr_scale < 1 and not end.run.observes
    phrases = [
        (counts.skips, f"skipped {counted(counts.skips, 'step')}"),
        (batches, f"left out {counted(batches, 'batch', 'batches')}"),
        (clips, f"clipped {counted(clips, 'step')}"),
        (counts.lr_cuts, f"cut the learning rate {counted(counts.lr_cuts, 'time')}"),
        *(
            (answers[answer], phrase.format(counted(answers[answer], "time")))
            for answer, phrase in _ANSWERS.items()
        ),
        (end.run.declined, f"declined {counted(end.run.declined, 'order')} of the policy"),
        (lowered, f"learning rate × {end.lr_scale:.3g} at the end"),
    ]
    return [phrase for number, phrase in phrases if number]


_ANSWERS = {
    "shrink_microbatch": "split the batch {} when memory ran out",
    "skip_batch": "skipped an unreadable batch {}",
    "retry": "repeated a network call {}",
}
"""Response to a fault -> phrase with a count."""


def advice(cause: Cause, *, rollbacks: int = 0) -> list[str]:
    """Advice by cause."""
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
    """Reason why no checkpoint is known-good after `step` steps: text after a colon, or empty."""
    if probation is None:
        return ""
    text = f": a checkpoint is known-good after {probation} healthy steps (rollback.probation)"
    if step > probation:
        return text
    text += f", and the run has had {step}"
    return text if step < 2 else f'{text}. For short runs: rollback={{"probation": {step // 2}}}'


def last_line(end: RunEnd, newest: int | None) -> str:
    """The last line of a run on the console; `newest` is the newest checkpoint on disk, or None."""
    would = "would have " if end.run.observes else ""
    done = interventions(end)
    if end.counts.rollbacks:
        done.append(f"rolled back {counted(end.counts.rollbacks, 'time')}")
    last_good = "none" if end.last_good is None else f"step {end.last_good}"
    disk = "" if newest is None else f"checkpoint {newest} is on disk, "
    ended = STATES[RunState(end.ending)]
    if end.ending == Ending.REQUESTED:
        ended = f"ended by {end.why}"
    elif end.ending == Ending.STOPPED:
        ended += f" ({end.why})"
    what = ", ".join(f"{would}{each}" for each in done) or "no intervention"
    lost = f"; {lost_steps_text(end)}" if end.steps_lost else ""
    kept = f"{disk}newest known-good checkpoint: {last_good}"
    return f"{ended} after step {end.step}: {what}{lost}; {kept}"


def lost_steps_text(end: RunEnd) -> str:
    """A clause about the steps that rollbacks have undone and that were not repeated."""
    total = end.step + end.steps_lost
    because = f", because {end.why_lost}" if end.why_lost else ""
    return f"{end.steps_lost:,} of {total:,} steps were not repeated{because}"


FROM_START = 100
"""Steps after which a run ends that has had no finite step."""
IN_A_ROW = 1_000
"""Consecutive steps without a finite step after which any other run ends."""


def by_optimizer_text(numbers: Sequence[str]) -> str:
    """The explanation of a step whose gradients were finite, and whose update was not.

    `numbers` is the result of `Driver.suspect_numbers`.
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
    """The sentence about a run of which `row` consecutive steps were not finite.

    `weights` has the names of the parameters with NaN or Inf, in their order. A skip changes no
    parameter, so a run without a finite step has the parameters that it was started with.
    """
    which, since = ("first", " since the start") if from_start else ("last", "")
    text = f"none of the {which} {row:,} steps was finite, so nothing was trained"
    if weights:
        loaded = "loaded " if from_start else ""
        return f"{text}: the {loaded}weights are NaN or Inf; the first tensor is {weights[0]}"
    if not record.taken:
        return f"{text}: the training step has kept its old state{since}"
    if record.by_optimizer:
        return f"{text}: the gradients were finite, and the optimizer made NaN or Inf of them"
    named = [each.name for each in record.evidence if not math.isfinite(each.grad_norm)]
    first = f"; the first tensor is the gradient of {named[0]}" if named else ""
    what = "loss" if record.cause & Cause.NONFINITE_LOSS else "gradient"
    return f"{text}: the {what} is NaN or Inf{since}{first}"


def _wrapped(text: str, *, first: str = "", then: str = "") -> str:
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=then, **whole)
