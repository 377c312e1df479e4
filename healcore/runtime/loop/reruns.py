"""Runs a bad window again with nothing changed: is the fault transient or reproducible?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from healcore.core.verdict import Action
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.events.models import RerunVerdict
from healcore.runtime.incidents.monitor import ActionRequest
from healcore.runtime.ledger import Ledger
from healcore.runtime.rollback.journal import Journal


class RerunWindow(NamedTuple):
    """The steps that are run again."""

    onset: int
    last: int
    """The step that brought the order."""


class Reruns:
    """At most one re-run at a time, and one in a region.

    Args:
        enabled: the user wants re-runs.
        region: onsets fewer steps apart than this belong to the same trouble.
        loaders: the data, which has to be rewound for a re-run.
        ledger: rollbacks so far.
        journal: re-runs so far, in earlier processes too.
        log_event: writes an event, see `Log.write`.
        info: writes a line to the console log.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        region: int,
        loaders: LoaderRegistry,
        ledger: Ledger,
        journal: Journal,
        log_event: Callable[..., object],
        info: Callable[[str], object],
    ) -> None:
        self._enabled = enabled
        self._region = region
        self._loaders = loaders
        self._ledger = ledger
        self._journal = journal
        self._log_event = log_event
        self._info = info
        self._window: RerunWindow | None = None
        self.verdict = ""
        """Of the last re-run: `transient` or `reproducible`; "": there was none."""

    def should_rerun(self, request: ActionRequest) -> bool:
        """Whether to answer a request with a re-run. A second one in a region shows nothing new."""
        past = (each.onset for each in self._ledger.past_rollbacks)
        onsets = [*self._journal.state.rerun_onsets, *past]
        near = any(abs(request.onset - onset) <= self._region for onset in onsets)
        return self._enabled and not near and not request.overridden and self._loaders.can_rewind

    def start(self, onset: int, last: int) -> None:
        """The run has gone back to before the window."""
        self._window = RerunWindow(onset, last)

    def cancel(self) -> None:
        """An ordinary rollback has taken the place of the re-run."""
        self._window = None

    def observe(self, index: int, request: ActionRequest | None) -> None:
        """Takes every step, and reports the verdict at the end of the window."""
        window = self._window
        if window is None:
            return
        again = request is not None and bool(request.action & (Action.ROLLBACK | Action.STOP))
        if not again and index < window.last:
            return
        self._window = None
        self.verdict = RerunVerdict.REPRODUCIBLE if again else RerunVerdict.TRANSIENT
        self._log_event("verdict", step=index, outcome=self.verdict, onset=window.onset)
        self._info(f"step {index}: the fault of step {window.onset} is {self.verdict}")
