"""`TrainerCheckpoints`: the store of a run whose checkpoints the trainer saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from healcore.torch.store import MemoryStore


class TrainerCheckpoints(MemoryStore):
    """A store that holds nothing, for a run without rollbacks whose checkpoints the trainer saves.

    The Healer needs a store. In such a run it has nothing to restore, and the trainer's own
    checkpoints have the state of the policy.

    Args:
        save_now: called if the policy orders a checkpoint. Makes the trainer save.
    """

    def __init__(self, save_now: Callable[[], None]) -> None:
        super().__init__()
        self.trainer_save = save_now

    def replace_record(self, step: int, record: Mapping[str, Any]) -> None:
        """Does nothing, because the trainer's checkpoint has the state of the policy."""

    def nonfinite_in(
        self, state: Mapping[str, Any], names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Returns an empty tuple without a check, which would copy the state."""
        return ()
