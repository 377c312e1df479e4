"""Defines `Tracker`, which receives metrics and events of a run, and the text of an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

_NOT_IN_TEXT = frozenset(
    {"schema", "seq", "run", "time", "mono", "kind", "step", "evidence", "batches", "readings"}
    | {"policy_toml", "environment", "fingerprint", "host", "pid", "boot", "born"}
)
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
    fields = {name: value for name, value in event.items() if name not in _NOT_IN_TEXT}
    kind, step, parts = event["kind"], event.get("step"), []
    for name, value in fields.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        parts.append(text if name == kind else f"{name} {text}")
    head = kind if step is None else f"{kind} at step {step}"
    return f"{head}: {', '.join(parts)}"[:_MAX_TEXT] if parts else head


def title_of(event: Mapping[str, Any]) -> str:
    """The title of an alert: what happened, and why."""
    causes = ", ".join(event.get("cause", ())).lower().replace("_", " ")
    return f"healcore: {event['kind']}{f': {causes}' if causes else ''}"


def is_error(event: Mapping[str, Any]) -> bool:
    """Whether the run cannot go on as it is: it was stopped, or the cause is an error."""
    return event["kind"] == "stop" or event.get("severity") == "error"
