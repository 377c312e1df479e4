"""The case of a run that did not get to tell it, put together from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.runtime.events.reading import Event
from healcore.runtime.postmortem.diagnosis import Case, Tried


def last_run(events: Sequence[Event]) -> list[Event]:
    """The events of the run that began last, from its `start` on; empty if none has begun."""
    begun = [event for event in events if event["kind"] == "start"]
    if not begun:
        return []
    start = begun[-1]
    own = [e for e in events if e["run"] == start["run"] and e["seq"] >= start["seq"]]
    return sorted(own, key=lambda event: event["seq"])


_BEHIND = ("good", "damaged", "save_failed")
"""Told when a checkpoint's turn has come; their `step` is the checkpoint's, long gone by."""


def retell(run: Sequence[Event], before: Iterable[Event] = (), *, why: str = "") -> Case:
    """What is known of a run that was killed.

    Args:
        run: its events, as `last_run` gives them.
        before: all events of the file: an earlier run may have had the last known-good checkpoint.
        why: for the headline.
    """
    seen = _last_incident(run)
    trouble = {name: _latest(seen, name).get(name) for name in ("readings", "evidence", "batches")}
    return Case(
        ending="killed",
        step=_latest([e for e in run if e["kind"] not in _BEHIND], "step").get("step", 0),
        why=why,
        cause=_cause(_latest(seen, "cause")),
        onset=_latest(seen, "onset").get("onset"),
        open=None,
        incidents=max((e["incident"] for e in run if e["kind"] == "incident"), default=0),
        readings=_readings(trouble),
        evidence=tuple(
            Evidence(each["name"], float(each["grad_norm"])) for each in trouble["evidence"] or ()
        ),
        batches=_batches(trouble),
        skips=sum(event["kind"] == "alarm" and event.get("skip", False) for event in run),
        tried=tuple(
            _tried(event)
            for event in run
            if event["kind"] == "rollback" and event.get("outcome") != "trial"
        ),
        lr_scale=float(_latest(run, "lr_scale").get("lr_scale", 1.0)),
        verdict=_verdict(run),
        damaged=tuple(_subject(event) for event in run if event["kind"] == "damaged"),
        observes=run[0].get("mode") == "observe",
        last_good=_last_good([*before, *run]),
    )


def _latest(run: Sequence[Event], field: str) -> Mapping[str, Any]:
    """The last event that has the field."""
    return next((event for event in reversed(run) if event.get(field) is not None), {})


def _last_incident(run: Sequence[Event]) -> list[Event]:
    """What was seen of it, from its first event on; not what was done about it."""
    first = max((i for i, e in enumerate(run) if e["kind"] == "incident"), default=0)
    return [e for e in run[first:] if e["kind"] in ("incident", "alarm", "order")]


def _subject(event: Event) -> int:
    """The checkpoint that an event is about."""
    return event.get("checkpoint", event["step"])


def _cause(event: Mapping[str, Any]) -> Cause:
    known = Cause.__members__
    cause = Cause(0)
    for name in event.get("cause", ()):
        cause |= known.get(name, Cause.UNKNOWN)  # a newer healcore's
    return cause


def _readings(event: Mapping[str, Any]) -> Readings | None:
    numbers = event["readings"]
    if numbers is None:
        return None
    return Readings(*(float(numbers[name]) for name in Readings._fields))


def _batches(event: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((epoch, index) for epoch, index in event["batches"] or ())


def _tried(event: Event) -> Tried:
    lr, before, after = (event.get(name) for name in ("lr", "lr_scale_before", "lr_scale"))
    return Tried(
        step=event["step"],
        onset=event.get("onset", event["step"]),
        target=event["checkpoint"],
        lr_before=None if lr is None or before is None else float(lr) * float(before),
        lr_after=None if lr is None or after is None else float(lr) * float(after),
        left_out=len(event.get("batches", ())),
    )


def _verdict(run: Sequence[Event]) -> str:
    words = [event["outcome"] for event in run if event["kind"] == "verdict"]
    return next((each for each in ("transient", "reproducible") if words[-1:] == [each]), "")


def _last_good(events: Iterable[Event]) -> int | None:
    """The newest known-good checkpoint that has not been set aside, of the last store used."""
    good: set[int] = set()
    store = None
    for event in events:
        kind = event["kind"]
        if kind == "start" and event.get("store") != store:
            store = event.get("store")
            good.clear()
        if kind == "good":
            good.add(_subject(event))
        elif kind in ("quarantine", "damaged"):
            good.discard(_subject(event))
        if event.get("last_good") is not None:
            good.add(event["last_good"])
    return max(good, default=None)
