"""Defines the protocol `Tracker`, and how trackers show events as text and as alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from healcore.events.models import validate
from healcore.events.schema import SEVERE, flag_names, sentence

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
    """Returns one line about an event."""
    step = event.get("step")
    head = event["kind"] if step is None else f"{event['kind']} at step {step}"
    text = sentence(validate(event)[0])
    return f"{head}: {text}"[:_MAX_CHARACTERS] if text else head


def alert_of(event: Mapping[str, Any]) -> tuple[str, str, bool] | None:
    """Returns title, text, and whether it is an error, of a severe event; else None."""
    kind = event["kind"]
    if kind not in SEVERE:
        return None
    causes = flag_names(event.get("cause", ()))
    is_error = kind == "stop" or event.get("severity") == "error"
    return f"healcore: {kind}{f': {causes}' if causes else ''}", event_text(event), is_error
