"""Events as one line each, for a terminal; those that are no news have none."""

from __future__ import annotations

from collections.abc import Callable

from healcore.runtime.events.models import EventRecord, RollbackOutcome
from healcore.tools.report.words import words
from healcore.tools.terminal import clean

GRAVE = frozenset({"rollback", "stop", "problem", "save_failed", "damaged"})
"""Kinds that should catch the eye."""


def line(event: EventRecord) -> str | None:
    """What an event says, or None: it is of no interest to somebody who watches."""
    wording = _WORDINGS.get(event.kind)
    if wording is None:
        return None
    step = "-" if event.step is None else event.step
    return plain(f"{(event.time or '')[11:19]:8} {step:>8}  {wording(event)}")


def plain(text: str) -> str:
    """In one line, without what a terminal would take for an order."""
    return clean(" ".join(text.split()), keep="")


def _start(event: EventRecord) -> str:
    observed = " (it observes, and changes nothing)" if event.mode == "observe" else ""
    framework = event.framework or ""
    return f"run {event.run} begins: {framework}, policy {_or(event.policy)}{observed}"


def _incident(event: EventRecord) -> str:
    cause = words(event.cause or ()) or "cause not known"
    return f"incident {_or(event.incident)}: {cause}"


def _order(event: EventRecord) -> str:
    would = "would order" if event.observed else "ordered"
    return f"{would}: {', '.join(words([each]) for each in event.action or ())}"


def _rollback(event: EventRecord) -> str:
    target = _or(event.checkpoint)
    if event.outcome == RollbackOutcome.TRIAL:
        return f"taken again from step {target}, to see whether it happens again"
    rate = "" if event.lr_scale is None else f", learning rate × {event.lr_scale:.3g}"
    left = f", {len(event.batches)} batches left out" if event.batches else ""
    return f"back to the checkpoint of step {target}{rate}{left}"


def _lr(event: EventRecord) -> str:
    before, after = event.lr_scale_before, event.lr_scale
    if not before or not after:
        return "learning rate"
    would = "would be " if event.observed else ""
    return f"learning rate {would}× {after:.3g}, was {before:.3g}"


def _hook(event: EventRecord) -> str:
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    return f"hook {event.hook or ''}: {words(event.action or ()) or 'nothing'} instead"


def _or(value: object) -> object:
    return "?" if value is None else value


_WORDINGS: dict[str, Callable[[EventRecord], str]] = {
    "start": _start,
    "resume": lambda event: f"goes on from the checkpoint of step {_or(event.checkpoint)}",
    "incident": _incident,
    "order": _order,
    "rollback": _rollback,
    "lr": _lr,
    "verdict": lambda event: f"the re-run showed it to be {_or(event.outcome)}",
    "hook": _hook,
    "stop": lambda event: f"stopped: {event.why or ''}",
    "problem": lambda event: f"problem: {event.problem or ''}",
    "save_failed": lambda event: f"a checkpoint was not written: {event.problem or ''}",
    "damaged": lambda event: f"a checkpoint is damaged: {event.problem or ''}",
    "end": lambda event: f"end: {event.ending or 'not known'}",
}
