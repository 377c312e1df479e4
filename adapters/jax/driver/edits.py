"""`Edits`: recognizes a step that did not start from the state that the Healer has edited.

    program   state of step 7 -- step --> state of step 8            (number of the edit: 0)
    Healer                                rolls back: state of step 5             (edit: 1)
    program                               state of step 8 -- step --> stale       (edit: 0)
                                          or, from `healer.state`: state of step 6 (edit: 1)

Without this check the program would continue as if there had been no rollback.
"""

from __future__ import annotations

from collections.abc import Sequence

from healcore.jax.driver.engines import edit_numbers, map_states
from healcore.jax.heal_state import HealState, with_edit
from healcore.jax.trees import PyTree


class Edits:
    """The edits of the state by the Healer: a rollback, `expect_change`, held numbers.

    The program passes the states that its steps return. A state that was computed from a state
    before the edit would undo the edit. So each edit writes its number into the healing states. A
    step keeps the number, and the next state of the program has to have it.

    Args:
        states: the HealState of each engine.
    """

    def __init__(self, states: Sequence[HealState]) -> None:
        self._number = max(edit_numbers(states))
        """Number of the last edit."""
        self._is_new = False
        """Whether no state of the program has continued from the last edit yet."""

    def mark(self, tree: PyTree) -> PyTree:
        """Counts an edit, and writes its number into the edited state.

        Args:
            tree: the edited state.

        Returns:
            The state from which the next step has to start.
        """
        self._number += 1
        self._is_new = True
        return map_states(lambda state: with_edit(state, self._number), tree)

    def is_stale(self, states: Sequence[HealState]) -> bool:
        """Whether a state of the program was computed from a state before the last edit.

        One sync in the first call after an edit, and none in later calls.

        Args:
            states: the HealState of each engine in the program's state.
        """
        if self._is_new:
            numbers = edit_numbers(states)
            self._is_new = any(number != self._number for number in numbers)
        return self._is_new
