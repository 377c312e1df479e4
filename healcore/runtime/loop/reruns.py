"""Going through a bad window a second time, with nothing changed: transient, or reproducible?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from healcore.core.verdict import Action
from healcore.runtime.data.feeds import Feeds
from healcore.runtime.events.models import RerunVerdict
from healcore.runtime.incidents.judge import Order
from healcore.runtime.ledger import Ledger
from healcore.runtime.rollback.journal import Journal


class Trial(NamedTuple):
    """The window."""

    onset: int
    last: int
    """Index of the step that brought the order."""


class Reruns:
    """At most one at a time, and one in a region.

    Args:
        wanted: the user asked for them.
        region: steps within which trouble is the same trouble.
        feeds: the data, which has to be rewound for it.
        ledger: rollbacks so far.
        journal: trials so far, in earlier processes too.
        log_event: writes an event, see `Log.write`.
        info: writes a line to the console log.
    """

    def __init__(
        self,
        *,
        wanted: bool,
        region: int,
        feeds: Feeds,
        ledger: Ledger,
        journal: Journal,
        log_event: Callable[..., object],
        info: Callable[[str], object],
    ) -> None:
        self._wanted = wanted
        self._region = region
        self._feeds = feeds
        self._ledger = ledger
        self._journal = journal
        self._log_event = log_event
        self._info = info
        self._current: Trial | None = None
        self.verdict = ""
        """What the last one has shown."""

    def wants(self, order: Order) -> bool:
        """Whether to answer an order with one. A second in a region would find the same, always."""
        onsets = [*self._journal.page.trials, *(past.onset for past in self._ledger.earlier)]
        near = any(abs(order.onset - onset) <= self._region for onset in onsets)
        return self._wanted and not near and not order.overridden and self._feeds.can_rewind

    def begin(self, onset: int, last: int) -> None:
        """The run has gone back to before the window."""
        self._current = Trial(onset, last)

    def drop(self) -> None:
        """The run has gone back for good."""
        self._current = None

    def watch(self, index: int, order: Order | None) -> None:
        """Takes every step that is judged."""
        trial = self._current
        if trial is None:
            return
        again = order is not None and bool(order.action & (Action.ROLLBACK | Action.STOP))
        if not again and index < trial.last:
            return
        self._current = None
        self.verdict = RerunVerdict.REPRODUCIBLE if again else RerunVerdict.TRANSIENT
        self._log_event("verdict", step=index, outcome=self.verdict, onset=trial.onset)
        self._info(f"step {index}: the fault of step {trial.onset} is {self.verdict}")
