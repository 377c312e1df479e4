"""Why a run ended, in plain words: what was seen, what was tried, what a person should look at.

Pure: a `Case` in, text out. The same case gives the same words on every rank.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.runtime.events.models import Ending
from healcore.runtime.incidents.hooks import Batch
from healcore.runtime.postmortem.advice import advice

_WIDTH = 96
_SHOWN = 5


class Tried(NamedTuple):
    """One rollback that was carried out."""

    step: int
    """The step it went back from."""
    onset: int
    target: int
    """Step of the checkpoint that was restored."""
    lr_before: float | None = None
    """Learning rate, multiplier included; None where it is not known."""
    lr_after: float | None = None
    left_out: int = 0
    """Batches that were left out."""


class Case(NamedTuple):
    """What is known of a run at its end. Everything but the first two may be left out."""

    ending: str
    """One of `completed`, `stopped`, `exception`, `signal`, `interrupted`, `killed`."""
    step: int
    """Optimizer steps done."""
    why: str = ""
    """What ended it, in words: "the budget of 3 recoveries is spent", "SIGTERM"."""
    cause: Cause = Cause(0)
    """Of the last incident; 0: there was none."""
    onset: int | None = None
    open: bool | None = None
    """Whether the last incident was still going on; None: not known."""
    incidents: int = 0
    readings: Readings | None = None
    evidence: tuple[Evidence, ...] = ()
    batches: tuple[Batch, ...] = ()
    """Data of the last incident's first steps."""
    skips: int = 0
    """Steps that were skipped, over the whole run."""
    tried: tuple[Tried, ...] = ()
    lr_scale: float = 1.0
    verdict: str = ""
    """What a re-run of the step showed: `transient`, `reproducible`, or "" for none."""
    damaged: tuple[int, ...] = ()
    """Steps of checkpoints that were found damaged on disk."""
    damaged_in_memory: tuple[int, ...] = ()
    """... and in host memory."""
    not_finite: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Steps of checkpoints with NaN or Inf where that is not meant, and in which arrays."""
    unsaved: int = 0
    """Checkpoints that could not be written."""
    unsaved_why: str = ""
    """Why the last of them could not."""
    observes: bool = False
    last_good: int | None = None
    path: str | None = None
    """Where that checkpoint lies."""
    exception: str | None = None
    """What was raised, as text."""


def explain(case: Case) -> str:
    """The diagnosis: a headline, then paragraphs that begin with what they are about."""
    parts = [
        _headline(case),
        *_seen(case),
        *_state(case),
        *_tried(case),
        *_unsaved(case),
        *_look_at(case),
        _last_good(case),
    ]
    return "\n".join(part for part in parts if part)


def _headline(case: Case) -> str:
    at = f"at step {case.step}"
    because = f": {case.why}" if case.why else ""
    match case.ending:
        case "completed":
            return f"The run is complete {at}{because}."
        case "stopped":
            return f"healcore stopped the run {at}{because}."
        case "exception":
            raised = f": {case.exception}" if case.exception else ""
            return _wrapped(f"The training loop raised an exception {at}{raised}")
        case "signal":
            return f"The run was ended from outside {at}{because}."
        case "interrupted":
            return f"The run was interrupted from the keyboard {at}{because}."
        case "killed":
            return _wrapped(
                f"The process was killed without notice; its last event is {at}{because}. Nothing "
                "of its own says why: look for the out-of-memory killer (dmesg), the scheduler's "
                "time limit or preemption, and the machine's own log."
            )
    raise ValueError(f"ending is one of {', '.join(Ending)}, not {case.ending!r}")


def _seen(case: Case) -> Iterator[str]:
    if not case.cause:
        if case.incidents:
            yield _section("Seen", f"{_count(case.incidents, 'incident')}, all of them over.")
        return
    names = ", ".join(each.name.lower() for each in Cause if each.name and each in case.cause)
    since = "" if case.onset is None else f" from step {case.onset} on"
    sentences = [f"{names}{since}{', over by then' if case.open is False else ''}."]
    if case.readings is not None:
        sentences.append(_numbers(case.readings))
    if case.evidence:
        sentences.append(f"Gradients that stood out: {_listed(case.evidence)}.")
    if case.batches:
        sentences.append(f"Its data: {_batches(case.batches)}.")
    if case.verdict == "transient":
        sentences.append("The same step, taken again from a snapshot, was fine: a transient fault.")
    elif case.verdict == "reproducible":
        sentences.append("The same step, taken again from a snapshot, failed again: reproducible.")
    if case.incidents > 1:
        sentences.append(f"It was incident {case.incidents} of the run.")
    yield _section("Seen", " ".join(sentences))


def _state(case: Case) -> Iterator[str]:
    if not case.not_finite:
        return
    step, arrays = case.not_finite[0]
    shown = ", ".join(arrays[:_SHOWN]) + (" and more" if len(arrays) > _SHOWN else "")
    many = len(case.not_finite)
    saves = f"the checkpoint of step {step}" if many == 1 else f"{many} checkpoints since {step}"
    text = f"NaN or Inf in {shown}, in {saves}."
    if case.not_finite[-1][0] == case.step:
        text += " The run ends in that state."
    yield _section("State", text)


def _tried(case: Case) -> Iterator[str]:
    if case.observes:
        yield _section("Tried", "nothing: the policy only observes.")
        return
    done = []
    if case.skips:
        done.append(f"skipped {_count(case.skips, 'step')}")
    if len(case.tried) > _SHOWN:
        done.append(f"{len(case.tried) - _SHOWN} earlier rollbacks")
    done += [_rollback(each) for each in case.tried[-_SHOWN:]]
    if case.lr_scale < 1:
        done.append(f"the learning rate stands at {case.lr_scale:.3g} of its schedule")
    if done:
        yield _section("Tried", "; ".join(done) + ".")
    if case.damaged:
        steps = ", ".join(map(str, case.damaged[-_SHOWN:]))
        yield _section(
            "Storage", f"checkpoints found damaged: {steps}. Check the disk that they lie on."
        )

    if case.damaged_in_memory:
        steps = ", ".join(map(str, case.damaged_in_memory[-_SHOWN:]))
        yield _section(
            "Memory", f"checkpoints found damaged in host memory: {steps}. Check the machine's RAM."
        )


def _unsaved(case: Case) -> Iterator[str]:
    if case.unsaved:
        times = _count(case.unsaved, "checkpoint was", "checkpoints were")
        yield _section("Storage", f"{times} not saved; the last one: {case.unsaved_why}.")


def _look_at(case: Case) -> Iterator[str]:
    if case.ending == "completed" and case.open is False:
        return
    hints = advice(
        case.cause,
        verdict=case.verdict,
        rollbacks=len(case.tried),
        left_out=any(each.left_out for each in case.tried),
        lr_lowered=case.lr_scale < 1 or any(map(_lowered, case.tried)),
    )
    if hints:
        yield "Look at:"
    for hint in hints:
        yield _wrapped(hint, first="  - ", then="    ")


def _last_good(case: Case) -> str:
    if case.last_good is None:
        return _section("Last known-good", "none; resume from the start, or check one by hand.")
    where = f", in {case.path}" if case.path else ""
    return f"Last known-good: the checkpoint of step {case.last_good}{where}."


# -- pieces of sentences --------------------------------------------------------------------------


def _numbers(numbers: Readings) -> str:
    limit = f" (limit {numbers.threshold:.3g})" if numbers.threshold > 0 else ""
    return f"Last finite loss {numbers.loss:.4g}, last finite norm {numbers.grad_norm:.3g}{limit}."


def _listed(evidence: Sequence[Evidence]) -> str:
    shown = ", ".join(f"{each.name} ({each.grad_norm:.3g})" for each in evidence[:_SHOWN])
    more = len(evidence) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _batches(batches: Sequence[Batch]) -> str:
    shown = ", ".join(f"epoch {epoch} batch {index}" for epoch, index in batches[:_SHOWN])
    more = len(batches) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _rollback(tried: Tried) -> str:
    words = f"went back from step {tried.step} to {tried.target}"
    if _lowered(tried):
        words += f" with the learning rate {tried.lr_before:.3g} -> {tried.lr_after:.3g}"
    if tried.left_out:
        words += f" and without {_count(tried.left_out, 'batch', 'batches')}"
    return words


def _lowered(tried: Tried) -> bool:
    """Going back sets the user's own schedule back too: the rate of then may be the higher one."""
    before, after = tried.lr_before, tried.lr_after
    return before is not None and after is not None and after < before


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


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
