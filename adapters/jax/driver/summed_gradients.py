"""`SummedGradients`: whether a program that sums gradients itself is in the middle of a window."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from healcore.jax.driver.step_reader import any_replaced
from healcore.runtime.faults.microbatches import Gradients
from healcore.runtime.store.ranks import Ranks


class SummedGradients(Gradients):
    """Implements `healcore.runtime.faults.microbatches.Gradients`: the loop sums the gradients.

    If a batch does not fit the memory, the Healer's loop repeats it in smaller parts. In JAX the
    program sums their gradients itself, so this class only knows whether a step has been taken.

    Args:
        counters: returns arrays that every optimizer step replaces by other objects.
    """

    def __init__(self, counters: Callable[[], list[Any]]) -> None:
        self._counters = counters
        self._begin: list[Any] | None = None

    def is_accumulating(self) -> bool:
        """Whether a window has begun without a step since.

        A part of a batch is then pending, and the loop may not repeat the batch as a whole.
        """
        return self._begin is not None and not self.has_stepped()

    def begin_window(self) -> None:
        """Records the counters of the current state, before the first part of a batch."""
        self._begin = self._counters()

    def has_stepped(self) -> bool:
        """Whether the state has been replaced since `begin_window`."""
        return self._begin is not None and any_replaced(self._counters(), self._begin)

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Frees unreferenced arrays before a batch is repeated in smaller parts.

        Args:
            kept_alive: objects that the loop has kept, such as the batch. Emptied.
            clear_cache: ignored, because XLA caches no memory of the device.
        """
        del clear_cache
        kept_alive.clear()
        gc.collect()  # an exception and its frames refer to each other

    def join_ranks(self, ranks: Ranks) -> str:
        """Reason why several processes cannot repeat a step together.

        Args:
            ranks: the exchange between the processes. Not used.
        """
        del ranks
        return (
            "the other processes wait in collectives of the compiled step, which this process has "
            "left"
        )
