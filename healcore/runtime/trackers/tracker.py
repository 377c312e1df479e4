"""Defines `Tracker`, which receives metrics and events of a run, and how events are shown in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from healcore.events.json_lines import to_json
from healcore.events.schema import SEVERE
from healcore.runtime.sentences import flag_names, sentence_and_fields

_NOT_IN_TEXT = frozenset(
    {"evidence", "batches", "readings", "policy_toml", "environment", "fingerprint"}
    | {"host", "pid", "boot", "born"}
)
_ROWS = 1000
"""Rows of a table of events; the events file has all."""
_MAX_TEXT = 1000
"""Characters: trackers limit what a text may have (mlflow's tags to 5,000)."""


class TrackedRun(NamedTuple):
    """The run that a tracker is about."""

    id: str
    """An id that all processes of a run share, also after a resume from its store."""
    config: dict[str, Any]
    """The fields of the event `start`: the policy, its text and mode, the framework, ..."""


@runtime_checkable
class Tracker(Protocol):
    """What `Healer(trackers=...)` sends metrics and events to.

    All methods are called in one thread of their own, in the order of what happened, and may block
    or raise: the training goes on, and the first error is reported. Three more methods are called
    if the object has them: `start(run)` with a `TrackedRun` before anything else, `flush()` about
    twice a second after what has arrived since, and `close()` at the end of the run.
    """

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Receives the numbers of one optimizer step.

        Args:
            step: its index, from 0. After a rollback or a restart it goes back.
            values: names such as `heal/loss`, see docs/trackers.md; NaN and Inf occur.
        """
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Receives an event, as in docs/events.md: `kind`, `step`, `time`, `run` and its fields."""
        ...


def text_of(event: Mapping[str, Any]) -> str:
    """One line about an event, without what only programs read."""
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

    The table has the first events of a process: when something goes wrong for long, the cause is
    there. Its last row is always the newest event.
    """

    def __init__(self) -> None:
        self.columns: Any = ["step", "kind", "time", "event"]
        self._rows: list[list[Any]] = []

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds a row, and alerts if a person should know."""
        text = text_of(event)
        del self._rows[_ROWS - 1 :]
        self._rows.append([event["step"], event["kind"], event["time"], text])
        if event["kind"] in SEVERE:
            causes = flag_names(event.get("cause", ()))
            title = f"healcore: {event['kind']}{f': {causes}' if causes else ''}"
            # The run cannot go on as it is: it was stopped, or the cause is an error.
            is_error = event["kind"] == "stop" or event.get("severity") == "error"
            self._alert(title, text, event["step"], is_error=is_error)

    def _alert(self, title: str, text: str, step: int | None, *, is_error: bool) -> None:
        raise NotImplementedError
