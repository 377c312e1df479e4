"""Defines the protocol `Tracker`, and how trackers show events as text and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from healcore.events.json_lines import to_json
from healcore.events.schema import SEVERE
from healcore.runtime.postmortem.sentences import flag_names, sentence_and_fields

_NOT_IN_TEXT = frozenset(
    {"evidence", "batches", "readings", "policy_toml", "environment", "fingerprint"}
    | {"host", "pid", "boot", "born"}
)
_MAX_ROWS = 1000
"""Limit of the table of events. The events file has all events."""
_MAX_CHARACTERS = 1000
"""Limit of the text of an event, because trackers have limits (mlflow: 5,000 in a tag)."""


class TrackedRun(NamedTuple):
    """The identity and the configuration of a run, for its trackers."""

    id: str
    """Id of the run, the same in all processes and after a resume."""
    config: dict[str, Any]
    """Fields of the event `start`, such as policy, mode and framework."""


@runtime_checkable
class Tracker(Protocol):
    """Receiver of metrics and events, for `Healer(trackers=...)`.

    All methods are called in one thread. An event may come before the numbers of its step. Methods
    may block or raise: the training continues, and healcore reports the first error. Optional
    methods: `start(run)` gets a `TrackedRun` and is called first, `flush()` twice a second,
    `close()` at the end of the run.
    """

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Receives the numbers of one optimizer step.

        Args:
            step: index of the step, from 0. Decreases after a rollback or a restart.
            values: name -> number, which may be NaN or Inf. docs/reports.md lists the names.
        """
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Receives an event: `kind`, `step`, `time`, `run`, and the fields in docs/events.md."""
        ...


def event_text(event: Mapping[str, Any]) -> str:
    """Returns one line about an event, without the fields in `_NOT_IN_TEXT`."""
    sentence, fields = sentence_and_fields(to_json(event))
    kind, step = event["kind"], event.get("step")
    shown = (
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in fields.items()
        if name not in _NOT_IN_TEXT
    )
    head = kind if step is None else f"{kind} at step {step}"
    text = "; ".join(filter(None, (sentence.removeprefix(f"{kind}: "), ", ".join(shown))))
    return f"{head}: {text}"[:_MAX_CHARACTERS] if text else head


class EventTable:
    """Base class of trackers that show events as rows of a table and as alerts.

    A full table has the first events of a process, because these show the cause of a long problem,
    and the newest event as the last row.
    """

    def __init__(self) -> None:
        self.columns: Any = ["step", "kind", "time", "event"]
        self._rows: Any = []

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds a row, and an alert for a severe event."""
        text = event_text(event)
        del self._rows[_MAX_ROWS - 1 :]
        self._rows.append([event["step"], event["kind"], event["time"], text])
        if event["kind"] in SEVERE:
            causes = flag_names(event.get("cause", ()))
            title = f"healcore: {event['kind']}{f': {causes}' if causes else ''}"
            is_error = event["kind"] == "stop" or event.get("severity") == "error"
            self._alert(title, text, event["step"], is_error=is_error)

    def _alert(self, title: str, text: str, step: int | None, *, is_error: bool) -> None:
        raise NotImplementedError
