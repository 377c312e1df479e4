"""`ProgramLoader`: puts the program's state of a checkpoint into the live run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healcore.runtime.driver import Driver, Engines
from healcore.runtime.run.data_state import DATA_STATE_ITEM
from healcore.runtime.run.restore.stored import SavedItems
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.store import CheckpointStore

if TYPE_CHECKING:
    from healcore.runtime.run.record.run_record import RunRecord


class ProgramLoader:
    """The state that the program has passed to the Healer, as a checkpoint holds it.

    This class loads nothing else. `RollbackRestore` and `Resumption` call it, and continue
    healcore's own records, the loaders and the random states themselves.

    Args:
        policy: says whether a rollback resets the moments of the optimizers.
        driver: loads the state.
        store: the store with the checkpoints.
        record: knows at which checkpoints steps are repeated.
        items: returns name -> item of the live state, see `Saver.items`.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        store: CheckpointStore,
        record: RunRecord,
        items: Callable[[], dict[str, Any]],
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._store = store
        self._record = record
        self._items = items

    def load(self, saved: SavedItems, engines: Engines, *, reset: bool) -> None:
        """Puts the program's state of a checkpoint into the live run.

        Args:
            saved: items of the checkpoint, by name. Healcore's own item is not loaded.
            engines: engine states to load with it.
            reset: whether the moments of the optimizers start again at zero.
        """
        state = {name: each for name, each in saved.items() if name != DATA_STATE_ITEM}
        self._driver.load(state, engines, reset_moments=reset)

    def load_step(self, step: int) -> None:
        """Loads the program's state of a checkpoint, without healcore's record.

        The engines keep their states, and no step is undone. Moments of the optimizers are reset as
        after a rollback, if the policy says so.

        Args:
            step: step of the checkpoint.
        """
        saved = self._store.restore(step, self._items()).state
        self.load(saved, {}, reset=self.resets_moments_at(step))

    def resets_moments_at(self, step: int) -> bool:
        """Whether the moments start again at a checkpoint, because a rollback repeats from it.

        Args:
            step: step of the checkpoint.
        """
        resets = self._policy.rollback.reset_moments
        return resets and self._record.repeats_undone_steps(step)
