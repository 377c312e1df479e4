"""The gradients since the last optimizer step, which in JAX are values that the loop sums up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax

from healcore.jax.heal_state import HealStateError
from healcore.runtime.store.ranks import Ranks


class GradientWindow:
    """Implements `healcore.runtime.microbatches.window.Gradients`.

    Args:
        counters: arrays that every optimizer step replaces.
        state: reads the live state.
    """

    def __init__(self, counters: Callable[[], list[Any]], state: Callable[[], Any]) -> None:
        self._counters = counters
        self._state = state
        self._begin: list[Any] | None = None

    def accumulating(self) -> bool:
        """Whether a window has begun and no step has followed."""
        return self._begin is not None and not self.has_stepped()

    def begin_window(self) -> None:
        """Remembers the state by its counters."""
        self._begin = self._counters()

    def has_stepped(self) -> bool:
        """Whether the state is another one than at `begin_window`."""
        return self._begin is not None and differ(self._counters(), self._begin)

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Frees what nothing refers to any more; XLA keeps no cache of device memory to empty.

        Raises:
            HealStateError: the failed call was given the state to overwrite.
        """
        del clear_cache
        held.clear()
        gc.collect()  # an exception and its frames refer to each other
        leaves = jax.tree.leaves(self._state())
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise HealStateError(
                "the part ran out of memory in a function that was given healer.state in "
                "donate_argnums, and the state is gone: donate it only to the function that "
                "applies the summed gradients, which is called after the parts"
            )

    def between_ranks(self, ranks: Ranks) -> str:
        """Why the processes cannot do a step again together."""
        del ranks
        return (
            "the other processes wait in the collectives of the compiled step, which this one has "
            "left"
        )


def differ(arrays: list[Any], others: list[Any]) -> bool:
    """Whether an array was replaced, by which a step shows."""
    return any(a is not b for a, b in zip(arrays, others, strict=True))
