"""Defines `Tracker`, which receives metrics and events of a run, and how it shows events."""

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
_ROWS = 1000
"""Most rows of a table of events; the events file has all events."""
_MAX_TEXT = 1000
"""Most characters of a text; trackers have limits (mlflow's tags 5,000)."""


class TrackedRun(NamedTuple):
    """A run, for its trackers."""

    id: str
    """Id of the run, the same in all processes and after a resume from its store."""
    config: dict[str, Any]
    """The fields of the event `start`: the policy, its text and mode, the framework, ..."""


@runtime_checkable
class Tracker(Protocol):
    """Receiver of metrics and events, for `Healer(trackers=...)`.

    All methods are called in one thread, in the order of the records. They may block or raise: the
    training continues, and the first error is reported. Optional methods: `start(run)` with a
    `TrackedRun` is called first, `flush()` twice a second, and `close()` at the end of the run.
    """

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Receives the numbers of one optimizer step.

        Args:
            step: index of the step, from 0. Decreases after a rollback or a restart.
            values: names such as `heal/loss`, see docs/trackers.md; NaN and Inf occur.
        """
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Receives an event, as in docs/events.md: `kind`, `step`, `time`, `run` and its fields."""
        ...


def text_of(event: Mapping[str, Any]) -> str:
    """One line about an event, without fields for programs."""
    sentence, fields = sentence_and_fields(to_json(event))
    kind, step = event["kind"], event.get("step")
    others = (
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in fields.items()
        if name not in _NOT_IN_TEXT
    )
    head = kind if step is None else f"{kind} at step {step}"
    text = "; ".join(filter(None, (sentence.removeprefix(f"{kind}: "), ", ".join(others))))
    return f"{head}: {text}"[:_MAX_TEXT] if text else head


class EventTable:
    """The events of a run as rows of a table and as alerts, for trackers that have both.

    The table has the first events of a process, since these show the cause of long trouble, and
    the newest event as its last row.
    """

    def __init__(self) -> None:
        self.columns: Any = ["step", "kind", "time", "event"]
        self._rows: list[list[Any]] = []

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds a row, and an alert for a severe event."""
        text = text_of(event)
        del self._rows[_ROWS - 1 :]
        self._rows.append([event["step"], event["kind"], event["time"], text])
        if event["kind"] in SEVERE:
            causes = flag_names(event.get("cause", ()))
            title = f"healcore: {event['kind']}{f': {causes}' if causes else ''}"
            is_error = event["kind"] == "stop" or event.get("severity") == "error"
            self._alert(title, text, event["step"], is_error=is_error)

    def _alert(self, title: str, text: str, step: int | None, *, is_error: bool) -> None:
        raise NotImplementedError
