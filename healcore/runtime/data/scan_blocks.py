"""`ScanBlocks`: the blocks of a loop that is compiled as a whole, as positions of a loader.

`Healer.scan` has no data: its updates read what they need from their state. What a checkpoint has
to hold is how many updates are done, and a rollback has to begin a block again. A loader of blocks
gives both, with the machinery of every other loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from healcore.runtime.data.loader_adapter import LoaderAdapter


def _whole_number(name: str, value: Any) -> int:
    """The value as an int. Raises ValueError unless the value is a whole number >= 1."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1:
        return int(value)
    shape = getattr(value, "shape", ())
    if not shape:
        raise ValueError(f"{name} is a whole number >= 1, not {value!r}")
    raise ValueError(
        f"{name} is a whole number >= 1, not an array of shape {tuple(shape)}. Unlike lax.scan, "
        "healer.scan gives `update` only the number of the update: pass the number of updates, and "
        "read the data in `update`, as in data[number]"
    )


class ScanBlocks(LoaderAdapter):
    """Yields the number of each block's last update, which a `loss_fn` gets as its batch.

        blocks = ScanBlocks(10, every=4)
        [(blocks.first, int(last)) for last in blocks]  # [(0, 3), (4, 7), (8, 9)]

    It has no length: a restart may choose blocks of another size, so the number of blocks says
    nothing about the end. The position is the number of updates.

    Args:
        updates: number of updates in all blocks.
        every: number of updates in a block. The last block may have fewer.

    Attributes:
        first: number of the block's first update.
        count: number of updates in the block.

    Raises:
        ValueError: a number is not a whole number >= 1.
    """

    kind = "scan"

    def __init__(self, updates: int, every: int) -> None:
        super().__init__(self)
        self.updates = _whole_number("steps", updates)
        self.every = _whole_number("every", every)
        self.first = self.count = 0
        self._done = 0
        """Updates up to the end of the newest block."""
        self._index = 0
        """Number of blocks read."""

    @property
    def is_finished(self) -> bool:
        """Whether no update is left."""
        return self._done >= self.updates

    def __iter__(self) -> Iterator[np.int32]:
        while not self.is_finished:
            self.first = self._done
            self.count = min(self.every, self.updates - self._done)
            self._done += self.count
            self._index += 1
            yield np.int32(self._done - 1)

    def start(self, epoch: int) -> Iterator[Any]:
        """Begins with the first update."""
        self._done = self._index = 0
        return iter(self)

    def state(self, *, ended: bool) -> list[int]:
        """The position in the blocks, for a checkpoint.

        Args:
            ended: not used: the blocks are one epoch.

        Returns:
            The number of blocks and the number of updates so far.
        """
        return [self._index, self._done]

    def state_before(self, index: int) -> list[int] | None:
        """The state before the newest block, or None for an older block."""
        if index != self._index - 1:
            return None
        return [index, self.first]

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        """Continues after the updates of a state.

        Args:
            state: what `state` has returned.
            skip: number of blocks after the state, which the caller reads and drops.

        Returns:
            The blocks from there on, and `skip`.
        """
        self._index, self._done = state
        return iter(self), skip
