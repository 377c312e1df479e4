"""`ScanBlocks`: the blocks of a loop that is compiled as a whole, as a loader.

`Healer.scan` has no data: its updates read what they need from their state. What a checkpoint has
to hold is how many updates are done, and a rollback has to begin a block again. A loader of blocks
gives both, with the machinery of every other loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from healcore.runtime.data.readers import Reader


def _whole_number(name: str, value: Any) -> int:
    """The value as an int. Raises ValueError unless the value is a whole number >= 1."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ValueError(f"{name} is a whole number >= 1, not {value!r:.80}")


class ScanBlocks(Reader, Iterator[Any]):
    """Yields the number of each block's last update, which a `loss_fn` gets as its batch.

        blocks = ScanBlocks(10, every=4)
        [(blocks.first, int(last)) for last in blocks]  # [(0, 3), (4, 7), (8, 9)]

    It has no length: a restart may choose blocks of another size, so the number of blocks says
    nothing about the end. Its state is the number of updates. It is an iterator, which has one
    epoch: a restart with more updates continues after the last block.

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
    replays = True

    def __init__(self, updates: int, every: int) -> None:
        super().__init__(self)
        self.updates = _whole_number("steps", updates)
        self.every = _whole_number("every", every)
        self.first = self.count = self._done = 0

    def __next__(self) -> np.int32:
        if self._done >= self.updates:
            raise StopIteration
        self.first = self._done
        self.count = min(self.every, self.updates - self._done)
        self._done += self.count
        return np.int32(self._done - 1)

    def begin(self) -> Iterator[Any]:
        """Begins with the first update."""
        self._done = 0
        return self

    def state(self, index: int, *, newest: bool) -> int:
        """The number of updates before the next block, or else before the newest block."""
        return self._done if newest else self.first

    def resume(self, state: int, index: int) -> tuple[Iterator[Any], int]:
        """Continues after the updates of a state."""
        self._done = state
        return self, index
