"""`Edits`: recognizes a step that did not start from the state that the Healer has edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from healcore.jax.array_leaves import PyTree
from healcore.jax.driver import engines as engine_states
from healcore.jax.heal_state import HealState, with_edit


class Edits:
    """The edits of the state by the Healer: a rollback, `expect_change`, held numbers.

    A program passes states of its own. One that it has computed from a state before the edit would
    undo the edit. So each edit writes its number into the healing states. A step keeps the number,
    and the next state of the program has to have it.

    Args:
        states: the HealState of each engine.
    """

    def __init__(self, states: Sequence[HealState]) -> None:
        self._number = max(engine_states.edit_numbers(states))
        """Number of the last edit."""
        self._is_new = False
        """Whether no state of the program has continued from the last edit yet."""

    def mark(self, tree: PyTree) -> PyTree:
        """Returns an edited state with the number of a new edit.

        Args:
            tree: the edited state.
        """
        self._number += 1
        self._is_new = True
        return engine_states.map_states(lambda state: with_edit(state, self._number), tree)

    def is_stale(self, states: Callable[[], Sequence[HealState]]) -> bool:
        """Whether a state of the program is from before the last edit.

        One sync in the first call after an edit, and none in later calls.

        Args:
            states: returns the HealState of each engine in the program's state.
        """
        if self._is_new:
            numbers = engine_states.edit_numbers(states())
            self._is_new = any(number != self._number for number in numbers)
        return self._is_new
