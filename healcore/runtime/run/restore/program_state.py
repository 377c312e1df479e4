"""`ProgramState`: puts the program's state of a checkpoint into the live run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.runtime.driver import Engines
from healcore.runtime.run.data_state import DATA_STATE_ITEM
from healcore.runtime.run.restore.stored import SavedItems

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class ProgramState:
    """The state that the program has passed to the Healer, as a checkpoint holds it.

    This class loads nothing else. `RollbackRestore` and `Resumption` call it, and continue
    healcore's own records, the loaders and the random states themselves.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def load(self, saved: SavedItems, engines: Engines, *, reset: bool) -> None:
        """Puts the program's state of a checkpoint into the live run.

        Args:
            saved: items of the checkpoint, by name. Healcore's own item is not loaded.
            engines: engine states to load with it.
            reset: whether the moments of the optimizers start again at zero.
        """
        state = {name: each for name, each in saved.items() if name != DATA_STATE_ITEM}
        self.run.driver.load(state, engines, reset_moments=reset)

    def load_step(self, step: int) -> None:
        """Loads the program's state of a checkpoint, without healcore's record.

        The engines keep their states, and no step is undone. Moments of the optimizers are reset as
        after a rollback, if the policy says so.

        Args:
            step: step of the checkpoint.
        """
        saved = self.run.store.restore(step, self.run.saver.items()).state
        self.load(saved, {}, reset=self.resets_moments_at(step))

    def resets_moments_at(self, step: int) -> bool:
        """Whether the moments start again at a checkpoint, because a rollback repeats from it.

        Args:
            step: step of the checkpoint.
        """
        record = self.run.record
        return self.run.policy.rollback.reset_moments and record.repeats_undone_steps(step)
