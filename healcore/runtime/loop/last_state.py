"""`LastState`: saves the state after the last step when a run ends, in whatever way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.driver import Driver
from healcore.runtime.loop.saves import SaveSchedule
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import StoreError


@dataclass(eq=False, kw_only=True)
class LastState:
    """The state after the last step.

    Batches that were read since then come again after a restart: positions of the loaders and
    random states are saved as they were before these batches.
    """

    driver: Driver
    loaders: LoaderRegistry
    restorer: Restorer
    saves: SaveSchedule
    log: RunLog
    exact: bool
    """Whether to remember after each step what a save of that moment needs."""

    def after_step(self) -> None:
        """Call it after every step."""
        if self.exact:
            self.restorer.host.after_step()

    def save(self, step: int, waiting: Mapping[int, BatchId], *, completed: bool) -> None:
        """Saves a checkpoint of the last step, if the last one is older.

        Args:
            step: that was done last.
            waiting: number of a loader -> its first batch since then.
            completed: whether the loop has ended by itself, so that no batch waits.
        """
        exact = nullcontext if completed else self._after(step, waiting)
        self.saves.save_last(step, exact, completed=completed)

    def save_emergency(self, step: int, waiting: Mapping[int, BatchId]) -> str:
        """Saves before an exception ends the run; returns why not, or ""."""
        return self.saves.save_emergency(step, self._after(step, waiting))

    def _after(
        self, step: int, waiting: Mapping[int, BatchId]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context in which a save is of the moment after a step.

        StoreError if batches were read since then and not all that they changed is known.
        """

        @contextmanager
        def context() -> Iterator[None]:
            batches = {**self.loaders.all_unreadable(), **waiting}
            if not batches or not self.exact:
                yield
                return
            why_not = self.driver.undo_window()
            if why_not:
                raise StoreError(why_not)
            data = self.loaders.position_before(batches)
            if data is None:
                raise StoreError("the loader has no way back to the first batch of the step")
            with self.restorer.host.before_batches(data):
                yield
            line = "batches that were read for the next step come again after a restart"
            self.log.event("data", step=step, outcome=line)
            self.log.info(f"step {step}: {line}")

        return context
