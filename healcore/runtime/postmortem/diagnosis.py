"""Writes the diagnosis of a run's end: observations, actions and advice.

The text depends on the `RunEnd` alone, so all ranks write the same text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from healcore.console import counted
from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.events.models import Ending
from healcore.runtime.faults.failures import FAILURES
from healcore.runtime.incidents.hooks import Batch
from healcore.runtime.incidents.rollback import Rollback
from healcore.runtime.incidents.step_lines import readings_text

_WIDTH = 96
_SHOWN = 5

_FAULTS = Cause.OOM | Cause.DATA | Cause.NETWORK | Cause.HANG | Cause.UNKNOWN | Cause.WORKER
"""Causes of exceptions. A rollback is no response to them."""

AFTER_A_KILL = (
    "look for the out-of-memory killer (dmesg), the scheduler's time limit or preemption, and the "
    "machine's own log"
)
"""Advice about a process that was killed."""

_REPEATED = (
    "Rolling back did not help: more of the data is bad than was skipped, the learning rate is too "
    "high, or the cause is the model, its precision or its optimizer's settings, or is older than "
    "the checkpoints."
)
"""Advice after several rollbacks."""


class RunEnd(NamedTuple):
    """The facts about a run at its end."""

    ending: str
    """One of `Ending`."""
    step: int
    """Optimizer steps done."""
    why: str = ""
    """Reason of a stop, or name of the signal."""
    cause: Cause = Cause(0)
    """Cause of the last incident, or 0 without an incident."""
    onset: int | None = None
    open: bool | None = None
    """Whether the last incident was open or the last step unhealthy, or None if unknown."""
    incidents: int = 0
    """Incidents of the whole run, including undone incidents."""
    undone_incidents: int = 0
    readings: Readings | None = None
    evidence: tuple[Evidence, ...] = ()
    batches: tuple[Batch, ...] = ()
    """Batches of the first steps of the last incident."""
    skips: int = 0
    """Steps skipped in the whole run, including undone steps."""
    undone_skips: int = 0
    clips: int = 0
    """Steps clipped in the whole run."""
    lr_cuts: int = 0
    rollbacks: tuple[Rollback, ...] = ()
    lr_scale: float = 1.0
    damaged: tuple[int, ...] = ()
    """Steps of checkpoints found damaged on disk."""
    damaged_in_memory: tuple[int, ...] = ()
    """Steps of checkpoints found damaged in host memory."""
    not_finite: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Step and array names of each checkpoint with disallowed NaN or Inf."""
    unsaved: int = 0
    """Number of checkpoints that could not be written."""
    unsaved_why: str = ""
    """Error of the last checkpoint that could not be written."""
    observes: bool = False
    probation: int | None = None
    """Healthy steps after which a checkpoint is known-good, or None if unknown."""
    last_good: int | None = None
    last_good_path: str | None = None
    """Directory of the checkpoint `last_good`."""
    exception: str | None = None
    fault: Cause = Cause(0)
    """Cause of the exception, or 0 without an exception."""
    declined: int = 0
    """Number of orders that were declined for lack of evidence that the model was worse."""
    answered: Mapping[str, int] = MappingProxyType({})
    """Word of a rule for faults -> number of responses with it in this process."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """`Healer.metrics` at the end."""


def explain(end: RunEnd) -> str:
    """The diagnosis: a headline, then paragraphs with a label."""
    parts = [
        _headline(end),
        *_seen_section(end),
        *_state(end),
        *_actions(end),
        *_storage_section(end),
        *_advice_section(end),
        _last_good_text(end),
    ]
    return "\n".join(part for part in parts if part)


def _headline(end: RunEnd) -> str:
    at = f"at step {end.step}"
    because = f": {end.why}" if end.why else ""
    if end.ending == Ending.EXCEPTION:
        because = f": {end.exception}" if end.exception else ""
    if end.ending not in _HEADLINES:
        raise ValueError(f"ending is one of {', '.join(Ending)}, not {end.ending!r}")
    text = _HEADLINES[Ending(end.ending)].format(f"{at}{because}")
    if end.ending == Ending.KILLED and end.exception:
        text = (
            "The process was killed after another rank had ended; its last event is "
            f"{at}{because}. {end.exception}"
        )
    return _wrapped(text) if end.ending in (Ending.EXCEPTION, Ending.KILLED) else text


_HEADLINES = {
    Ending.COMPLETED: "The run is complete {}.",
    Ending.STOPPED: "healcore stopped the run {}.",
    Ending.EXCEPTION: "The training loop raised an exception {}",
    Ending.SIGNAL: "The run was ended from outside {}.",
    Ending.REQUESTED: "The run was ended on request {}.",
    Ending.INTERRUPTED: "The run was interrupted from the keyboard {}.",
    Ending.KILLED: "The process was killed without notice; its last event is {}. It could not "
    f"record why: {AFTER_A_KILL}.",
}


def _seen_section(end: RunEnd) -> Iterator[str]:
    sentences = _incidents(end)
    if sentences:
        yield _section("Seen", " ".join(sentences))


def _incidents(end: RunEnd) -> list[str]:
    if not end.cause:
        return [f"{incidents_text(end)}, all resolved."] if end.incidents else []
    names = ", ".join(flag.name.lower() for flag in Cause if flag.name and flag in end.cause)
    since = "" if end.onset is None else f" from step {end.onset} on"
    sentences = [f"{names}{since}{', resolved by the end' if end.open is False else ''}."]
    numbers = end.readings
    if numbers is not None and (text := readings_text(numbers, end.cause)):
        limit = f" (limit {numbers.threshold:.3g})" if numbers.threshold > 0 else ""
        sentences.append(f"At the first alarm: {text}{limit}.")
    if end.evidence:
        norms = _first([f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in end.evidence])
        sentences.append(f"Gradients that stood out: {norms}.")
    if end.batches:
        batches = _first([f"epoch {epoch} batch {index}" for epoch, index in end.batches])
        sentences.append(f"Its data: {batches}.")
    if end.incidents > 1:
        sentences.append(f"The run had {incidents_text(end)}.")
    return sentences


def _state(end: RunEnd) -> Iterator[str]:
    if not end.not_finite:
        return
    step, arrays = end.not_finite[0]
    shown = ", ".join(arrays[:_SHOWN]) + (" and more" if len(arrays) > _SHOWN else "")
    many = len(end.not_finite)
    saves = f"the checkpoint of step {step}" if many == 1 else f"{many} checkpoints since {step}"
    text = f"NaN or Inf in {shown}, in {saves}."
    if end.not_finite[-1][0] == end.step:
        text += " The run ends in that state."
    yield _section("State", text)


def _actions(end: RunEnd) -> Iterator[str]:
    if end.observes:
        yield _section("Tried", "nothing: the policy only observes.")
        return
    done = []
    if end.skips:
        done.append(f"skipped {with_undone(counted(end.skips, 'step'), end.undone_skips)}")
    if end.clips:
        done.append(f"clipped {counted(end.clips, 'step')}")
    done += answers_text(end.answered)
    if end.declined:
        done.append(f"declined {counted(end.declined, 'order')} of the policy")
    if len(end.rollbacks) > _SHOWN:
        done.append(f"{len(end.rollbacks) - _SHOWN} earlier rollbacks")
    done += [_rollback(rollback) for rollback in end.rollbacks[-_SHOWN:]]
    if end.lr_scale < 1:
        done.append(f"the learning rate is at {end.lr_scale:.3g} of its schedule")
    if done:
        yield _section("Tried", "; ".join(done) + ".")
    for part, damaged, where, check in (
        ("Storage", end.damaged, "", "the disk"),
        ("Memory", end.damaged_in_memory, " in host memory", "the machine's RAM"),
    ):
        if damaged:
            steps = ", ".join(map(str, damaged[-_SHOWN:]))
            yield _section(part, f"checkpoints found damaged{where}: {steps}. Check {check}.")


def _storage_section(end: RunEnd) -> Iterator[str]:
    if end.unsaved:
        times = counted(end.unsaved, "checkpoint was", "checkpoints were")
        yield _section("Storage", f"{times} not saved; the last one: {end.unsaved_why}.")


def _advice_section(end: RunEnd) -> Iterator[str]:
    if end.ending == Ending.COMPLETED and not (end.open or end.not_finite or end.fault):
        return
    hints = advice(end.cause | end.fault, rollbacks=len(end.rollbacks))
    if hints:
        yield "Look at:"
    for hint in hints:
        yield _wrapped(hint, first="  - ", then="    ")


def _last_good_text(end: RunEnd) -> str:
    if end.last_good is not None:
        where = f", in {end.last_good_path}" if end.last_good_path else ""
        return f"Last known-good: the checkpoint of step {end.last_good}{where}."
    text = "none" + why_no_good_checkpoint(end.step, end.probation)
    if end.ending != Ending.COMPLETED and not (end.incidents or end.not_finite):
        text += "; the run had no incident: the next start resumes from the newest checkpoint on "
        text += "disk, if any"
    elif end.ending != Ending.COMPLETED:
        text += "; resume from the start, or check a checkpoint by hand"
    return _section("Last known-good", f"{text}.")


def why_no_good_checkpoint(step: int, probation: int | None) -> str:
    """Reason why no checkpoint is known-good after `step` steps: text after a colon, or empty."""
    if probation is None:
        return ""
    text = f": a checkpoint is known-good after {probation} healthy steps (rollback.probation)"
    if step > probation:
        return text
    text += f", and the run has had {step}"
    return text if step < 2 else f'{text}. For short runs: rollback={{"probation": {step // 2}}}'


def answers_text(answered: Mapping[str, int]) -> list[str]:
    """A phrase for each kind of response to faults."""
    return [phrase(answered[word]) for word, phrase in _ANSWERS.items() if answered.get(word)]


_ANSWERS: dict[str, Callable[[int], str]] = {
    "shrink_microbatch": lambda n: f"split the batch {counted(n, 'time')} when memory ran out",
    "skip_batch": lambda n: f"skipped {counted(n, 'unreadable batch', 'unreadable batches')}",
    "retry": lambda n: f"repeated a network call {counted(n, 'time')}",
}


def incidents_text(end: RunEnd) -> str:
    """The number of incidents as text."""
    return with_undone(counted(end.incidents, "incident"), end.undone_incidents)


def with_undone(count: str, undone: int) -> str:
    """A count as text, with the number that rollbacks have undone."""
    return f"{count} ({undone} undone by a rollback)" if undone else count


# -- pieces of sentences --------------------------------------------------------------------------


def _first(items: Sequence[str]) -> str:
    """The first few items, and the number of further items."""
    shown, more = ", ".join(items[:_SHOWN]), len(items) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _rollback(rollback: Rollback) -> str:
    text = f"rolled back from step {rollback.step} to {rollback.target}"
    if rollback.lr_text:
        text += f" with the {rollback.lr_text}"
    if rollback.skipped:
        text += f" and skipped {counted(rollback.skipped, 'batch', 'batches')}"
    return text


def _section(name: str, text: str) -> str:
    return _wrapped(text, first=f"{name}: ", then="  ")


def _wrapped(text: str, *, first: str = "", then: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- advice ---------------------------------------------------------------------------------------


def advice(cause: Cause, *, rollbacks: int = 0) -> list[str]:
    """Advice by cause."""
    hints = [row.diagnosis for flag, row in FAILURES.items() if flag in cause]
    if cause & ~_FAULTS and rollbacks > 1:
        hints.append(_REPEATED)
    return hints
