"""Events as one line each, for a terminal; those that are no news have none."""

from __future__ import annotations

from collections.abc import Callable

from healcore.runtime.events.reading import Event
from healcore.tools.report.sound import number, words
from healcore.tools.terminal import clean

GRAVE = frozenset({"rollback", "stop", "problem", "save_failed", "damaged"})
"""Kinds that should catch the eye."""


def line(event: Event) -> str | None:
    """What an event says, or None: it is of no interest to somebody who watches.

    Args:
        event: through `sound`.
    """
    wording = _WORDINGS.get(event["kind"])
    if wording is None:
        return None
    step = "-" if event["step"] is None else event["step"]
    return plain(f"{event.get('time', '')[11:19]:8} {step:>8}  {wording(event)}")


def plain(text: str) -> str:
    """In one line, without what a terminal would take for an order."""
    return clean(" ".join(text.split()), keep="")


def _start(event: Event) -> str:
    observed = " (it observes, and changes nothing)" if event.get("mode") == "observe" else ""
    framework = event.get("framework", "")
    return f"run {event['run']} begins: {framework}, policy {event.get('policy', '?')}{observed}"


def _incident(event: Event) -> str:
    cause = words(event.get("cause", ())) or "cause not told"
    return f"incident {event.get('incident', '?')}: {cause}"


def _order(event: Event) -> str | None:
    would = "would order" if event.get("observed") else "ordered"
    return f"{would}: {', '.join(words([each]) for each in event.get('action', ()))}"


def _rollback(event: Event) -> str:
    target = event.get("checkpoint", "?")
    if event.get("outcome") == "trial":
        return f"taken again from step {target}, to see whether it happens again"
    after, out = number(event, "lr_scale"), len(event.get("batches", ()))
    rate = "" if after is None else f", learning rate × {after:.3g}"
    left = f", {out} batches left out" if out else ""
    return f"back to the checkpoint of step {target}{rate}{left}"


def _lr(event: Event) -> str:
    before, after = number(event, "lr_scale_before"), number(event, "lr_scale")
    if not before or not after:
        return "learning rate"
    would = "would be " if event.get("observed") else ""
    return f"learning rate {would}× {after:.3g}, was {before:.3g}"


def _hook(event: Event) -> str:
    if "problem" in event:
        return f"a hook failed: {event['problem']}"
    return f"hook {event.get('hook', '')}: {words(event.get('action', ())) or 'nothing'} instead"


_WORDINGS: dict[str, Callable[[Event], str | None]] = {
    "start": _start,
    "resume": lambda event: f"goes on from the checkpoint of step {event.get('checkpoint', '?')}",
    "incident": _incident,
    "order": _order,
    "rollback": _rollback,
    "lr": _lr,
    "verdict": lambda event: f"the re-run showed it to be {event.get('outcome', '?')}",
    "hook": _hook,
    "stop": lambda event: f"stopped: {event.get('why', '')}",
    "problem": lambda event: f"problem: {event.get('problem', '')}",
    "save_failed": lambda event: f"a checkpoint was not written: {event.get('problem', '')}",
    "damaged": lambda event: f"a checkpoint is damaged: {event.get('problem', '')}",
    "end": lambda event: f"end: {event.get('ending', 'not told')}",
}
