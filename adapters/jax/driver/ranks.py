"""The processes of a JAX program, as the runtime sees them."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from healcore.runtime.store.ranks import Alone, Ranks


class JaxRanks:
    """Exchanges between the processes of jax.distributed, over the devices."""

    def __init__(self) -> None:
        self.rank = jax.process_index()
        self.world = jax.process_count()

    def gather(self, item: Any) -> list[Any]:
        """Every process's item, on every process."""
        mine = np.frombuffer(pickle.dumps(item), np.uint8)
        # process_allgather needs arrays of the same size in every process.
        sizes = multihost_utils.process_allgather(np.asarray([mine.size], np.int32)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: mine.size] = mine
        rows = multihost_utils.process_allgather(padded)
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def this_run() -> Ranks:
    """The processes of this program."""
    return JaxRanks() if jax.process_count() > 1 else Alone()
