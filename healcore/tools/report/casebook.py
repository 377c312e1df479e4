"""From a run's events to its incidents, its attempts, and what else belongs on the axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.events.reading import Event
from healcore.tools.report.case import Case
from healcore.tools.report.sound import number, words
from healcore.tools.report.story import Incident, Mark, Part

_EVIDENCE = 5
"""Tensors told of one incident."""


class Casebook(NamedTuple):
    """What the events tell."""

    incidents: tuple[Incident, ...]
    parts: tuple[Part, ...]
    """The attempts."""
    ids: tuple[tuple[str, int], ...]
    """Of each attempt the process's run id, and its number within that process."""
    marks: tuple[Mark, ...]
    alarms: tuple[tuple[int, Event], ...]
    """Attempt and event of every alarm."""
    capped: dict[int, Case]
    """By place in `incidents`: those that may have had alarms without an event."""
    repeats: int
    """Rollbacks after the first one of their incident."""


class _Teller:
    """Takes the events of one run, in order."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.parts: list[Part] = []
        self.ids: list[tuple[str, int]] = []
        self.marks: list[Mark] = []
        self.alarms: list[tuple[int, Event]] = []

    def take(self, event: Event) -> None:
        step = event["step"]
        if not self.parts or event["run"] != self.ids[-1][0]:
            self._begins(event)
        handler = _HANDLERS.get(event["kind"])
        if handler is not None:
            handler(self, event, float(step or 0))

    # -- attempts -------------------------------------------------------------------------------

    def _begins(self, event: Event) -> None:
        name = "another process" if self.parts else "the start"
        self.parts.append(Part(len(self.parts), float(event["step"] or 0), name))
        self.ids.append((event["run"], 0))

    def _resume(self, event: Event, step: float) -> None:
        at = float(event.get("checkpoint", step))
        self.parts[-1] = self.parts[-1]._replace(first_step=at, name="resumed")
        self.marks.append(Mark(at, "resume", f"resumed from the checkpoint of step {at:g}"))

    def _rollback(self, event: Event, step: float) -> None:
        target = event.get("checkpoint")
        if target is None:
            return
        trial = event.get("outcome") == "trial"
        onset = float(event.get("onset", step))
        if not self.cases or self.cases[-1].onset_step != onset:  # a hook's: of no incident
            self._open(event, onset)
        case = self.cases[-1]
        _add(case.action, ("ROLLBACK",))
        if trial:
            case.came.append(f"taken again from step {target}, to see whether it happens again")
        else:
            case.checkpoint = target
            case.rollbacks += 1
            case.cut(number(event, "lr_scale_before"), number(event, "lr_scale"))
            what = f"from step {step:g} back to the checkpoint of step {target}"
            if event.get("outcome") == "finished after a crash":
                what += ", finished by the next process"
            if event.get("initial"):
                what += ", the snapshot that the run started from"
            if event.get("repeated"):
                what += ", once more: nothing older is there"
            if event.get("batches"):
                case.batches, case.left_out = _batches(event), True
            case.came.append(what)
        run, ordinal = self.ids[-1]
        if event.get("outcome") == "finished after a crash":  # the process began with it
            self.parts[-1] = self.parts[-1]._replace(first_step=float(target), name="rollback")
            return
        self.parts.append(Part(len(self.parts), float(target), "trial" if trial else "rollback"))
        self.ids.append((run, ordinal + 1))

    # -- incidents ------------------------------------------------------------------------------

    def _incident(self, event: Event, step: float) -> None:
        self._open(event, float(event.get("onset", step)))

    def _alarm(self, event: Event, step: float) -> None:
        self.alarms.append((len(self.parts) - 1, event))
        if not event.get("incident"):
            self.marks.append(Mark(step, "alarm", words(event.get("cause", ()))))
            return
        case = self._case(event)
        case.step = max(case.step, step)
        case.alarms += 1
        case.skipped += event.get("skip", False)
        case.observed |= event.get("observed", False)
        _add(case.cause, event.get("cause", ()))
        _add(case.action, event.get("action", ()))
        if not case.evidence:
            case.evidence = [
                f"{each['name']} ({_short(each['grad_norm'])})"
                for each in event.get("evidence", ())[:_EVIDENCE]
            ]

    def _order(self, event: Event, step: float) -> None:
        if not event.get("incident"):
            told = f"{words(event.get('action', ()))} ordered: {words(event.get('cause', ()))}"
            self.marks.append(Mark(step, "order", told))
            return
        case, action = self._case(event), event.get("action", ())
        case.step = max(case.step, step)
        case.observed |= event.get("observed", False)
        case.rollbacks += case.observed and "ROLLBACK" in action
        if "STOP" in action and case.stop_step is None:
            case.stop_step = step
        _add(case.cause, event.get("cause", ()))
        _add(case.action, action)

    def _hook(self, event: Event, step: float) -> None:
        if "problem" in event:
            told = f"a hook failed: {event['problem']}"
        else:
            then = words(event.get("action", ())) or "nothing"
            ordered = words(event.get("ordered", ()))
            told = f"the hook {event.get('hook', '')} made {then} of {ordered}"
        if self._is_of_last(step):
            case, overridden = self.cases[-1], event.get("ordered", ())
            case.came.append(told)
            case.action = [name for name in case.action if name not in overridden]
            _add(case.action, event.get("action", ()))
        else:
            self.marks.append(Mark(step, "hook", told))

    def _lr(self, event: Event, step: float) -> None:
        before, after = number(event, "lr_scale_before"), number(event, "lr_scale")
        if before is None or after is None:
            return
        last = self.cases[-1] if self.cases else None
        # What cuts is an incident's order, also where its alarms have no events any more.
        if after < before and last is not None and last.attempt == len(self.parts) - 1:
            last.cut(before, after)
        else:
            would = "would go " if event.get("observed") else ""
            told = f"learning rate {would}from {before:.3g} to {after:.3g} of its schedule"
            self.marks.append(Mark(step, "lr", told))

    def _verdict(self, event: Event, step: float) -> None:
        if self.cases:
            self.cases[-1].came.append(f"the re-run showed it to be {event.get('outcome', '?')}")

    def _stop(self, event: Event, step: float) -> None:
        why = event.get("why", "")
        self.marks.append(Mark(step, "stop", f"stopped: {why}"))
        if self.cases:
            case = self.cases[-1]
            case.came.append(f"stopped the run: {why}")
            _add(case.action, ("STOP",))
            case.stop_step = step if case.stop_step is None else case.stop_step

    def _end(self, event: Event, step: float) -> None:
        self.marks.append(Mark(step, "end", f"end: {event.get('ending', 'not told')}"))

    # -- which one ------------------------------------------------------------------------------

    def _open(self, event: Event, onset: float) -> None:
        self.cases.append(
            Case(
                number=event.get("incident") or len(self.cases) + 1,
                attempt=len(self.parts) - 1,
                onset_step=onset,
                step=max(onset, float(event["step"] or 0)),
                cause=list(event.get("cause", ())),
                batches=_batches(event),
            )
        )

    def _case(self, event: Event) -> Case:
        """The incident that an event names; a torn line may have taken its begin."""
        if not self.cases or self.cases[-1].number != event["incident"]:
            self._open(event, float(event["step"] or 0))
        return self.cases[-1]

    def _is_of_last(self, step: float) -> bool:
        """Whether a step, of the attempt under way, is the last incident's latest."""
        last = self.cases[-1] if self.cases else None
        return last is not None and last.attempt == len(self.parts) - 1 and last.step == step


def open_casebook(events: Sequence[Event]) -> Casebook:
    """Reads the events of one run.

    Args:
        events: of all its processes, in order, each through `sound`.
    """
    teller = _Teller()
    for event in events:
        teller.take(event)
    return Casebook(
        incidents=tuple(case.told() for case in teller.cases),
        parts=tuple(teller.parts),
        ids=tuple(teller.ids),
        marks=tuple(teller.marks),
        alarms=tuple(teller.alarms),
        capped={place: case for place, case in enumerate(teller.cases) if case.capped},
        repeats=sum(max(case.rollbacks - 1, 0) for case in teller.cases),
    )


_HANDLERS = {
    "resume": _Teller._resume,
    "rollback": _Teller._rollback,
    "incident": _Teller._incident,
    "alarm": _Teller._alarm,
    "order": _Teller._order,
    "hook": _Teller._hook,
    "lr": _Teller._lr,
    "verdict": _Teller._verdict,
    "stop": _Teller._stop,
    "end": _Teller._end,
}
"""By kind of event."""


def _add(to: list[str], names: Sequence[str]) -> None:
    to.extend(name for name in names if name not in to)


def _batches(event: Event) -> list[tuple[int, int]]:
    return [(epoch, index) for epoch, index in event.get("batches", ())]


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
