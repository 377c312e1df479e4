"""Defines `GradientWindow`, the gradients since the last step, which the loop itself sums."""

from __future__ import annotations

import gc
from collections.abc import Callable
from operator import is_not
from typing import Any

import jax

from healcore.jax.heal_state import HealStateError
from healcore.runtime.store.ranks import Ranks


class GradientWindow:
    """Implements `healcore.runtime.microbatches.parts.Gradients`.

    Args:
        counters: returns arrays that every optimizer step replaces.
        state: returns the live state.
    """

    def __init__(self, counters: Callable[[], list[Any]], state: Callable[[], Any]) -> None:
        self._counters = counters
        self._state = state
        self._begin: list[Any] | None = None

    def accumulating(self) -> bool:
        """Whether a window has begun without a step since."""
        return self._begin is not None and not self.has_stepped()

    def begin_window(self) -> None:
        """Records the counters of the current state."""
        self._begin = self._counters()

    def has_stepped(self) -> bool:
        """Whether the state has been replaced since `begin_window`."""
        return self._begin is not None and differ(self._counters(), self._begin)

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Frees unreferenced arrays. Ignores `clear_cache`, because XLA caches no device memory.

        Raises:
            HealStateError: the failed call was passed the state as a donated argument.
        """
        del clear_cache
        held.clear()
        gc.collect()  # an exception and its frames refer to each other
        leaves = jax.tree.leaves(self._state())
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise HealStateError(
                "the part ran out of memory in a function that donates healer.state "
                "(donate_argnums), so the state is lost: donate it only to the function that "
                "applies the summed gradients, which is called after the parts"
            )

    def between_ranks(self, ranks: Ranks) -> str:
        """Reason why several processes cannot repeat a step together."""
        del ranks
        return (
            "the other processes wait in collectives of the compiled step, which this process has "
            "left"
        )


def differ(arrays: list[Any], others: list[Any]) -> bool:
    """Whether any array was replaced by another object."""
    return any(map(is_not, arrays, others))
