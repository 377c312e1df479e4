"""The compiled blocks of `Healer.scan`: `lax.scan` over the program's update.

    state, outputs = lax.scan(update, state, steps)            # the program's own loop
    state, (outputs, records) = lax.scan(body, state, steps)   # one block

The host does not see the updates within a block, so the block has to return what the Healer reads
of each of them. The ring of records in a state has room for the steps of one update only, and the
next update overwrites it. So the body returns the ring after each update, and `lax.scan` stacks it:

    healer.scan(update, state, 120, every=50)

    updates     0 ... 49        50 ... 99        100 ... 119
    device      [ block 0 ]     [ block 1 ]      [ block 2 ]
                  |    |          |     |          |     |
    host      records  state  records   state  records   state
              of 50    50     of 50     100    of 20     120

Between two blocks the Healer reads the records, and may save, compare and roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from healcore.jax.driver.step_reader import BlockRecords, block_records
from healcore.jax.heal_state import HealStateError
from healcore.jax.trees import Path, PyTree, arrays_of, node_at, with_arrays

Update = Callable[[Any, Any], tuple[Any, Any]]
"""(state, number of the update) -> (state, outputs), as for `lax.scan`."""


class CompiledBlocks:
    """The blocks of one update function, compiled once for each number of updates.

    Functions and texts in the state are constants of the compiled program, see `trees.arrays_of`.

    Args:
        update: the program's function.
        state: a state of the program, to which all later states have to fit.
        paths: path of each HealState in the state.
        donate: whether a block reuses the memory of the state that it begins with.
    """

    def __init__(
        self, update: Update, state: PyTree, paths: Sequence[Path], *, donate: bool
    ) -> None:
        self._update, self._paths = update, paths
        self._like = state
        donated: tuple[int, ...] = ()
        if donate:
            donated = (0,)
        self._compiled = jax.jit(self._block, donate_argnums=donated)

    def run(self, state: PyTree, first: int, count: int) -> tuple[PyTree, PyTree, BlockRecords]:
        """Dispatches a block, and returns without waiting for the device.

        Args:
            state: the state before the block. Unusable afterwards if the block donates it.
            first: number of the first update, from 0.
            count: number of updates.

        Returns:
            The state after the last update, the outputs of the updates, stacked, and what the host
            reads of each update.
        """
        steps = np.arange(first, first + count, dtype=np.int32)
        arrays, outputs, records = self._compiled(arrays_of(state), steps)
        return with_arrays(self._like, arrays), outputs, records

    def no_outputs(self, state: PyTree) -> Any:
        """The outputs of `lax.scan` over zero updates, whose first axis has length 0.

        Args:
            state: a state of the run, for the shapes.
        """
        _, outputs, _ = jax.eval_shape(self._block, arrays_of(state), np.zeros(1, np.int32))
        return jax.tree.map(lambda each: jnp.zeros((0, *each.shape[1:]), each.dtype), outputs)

    def _block(self, arrays: PyTree, steps: Any) -> tuple[Any, Any, Any]:
        """The function that is compiled: returns the state after the block, outputs and records."""

        def body(arrays: PyTree, step: Any) -> tuple[Any, Any]:
            state, outputs = self._checked(self._update(with_arrays(self._like, arrays), step))
            records = block_records(node_at(state, path) for path in self._paths)
            return arrays_of(state), (outputs, records)

        arrays, (outputs, records) = lax.scan(body, arrays, steps)
        return arrays, outputs, records

    def _checked(self, result: Any) -> tuple[Any, Any]:
        """The new state and the outputs, as `update` has returned them.

        Raises:
            HealStateError: `result` is not a pair, or its state has another structure.
        """
        if isinstance(result, tuple | list) and len(result) == 2:
            state, outputs = result
            if jax.tree.structure(state) == jax.tree.structure(self._like):
                return state, outputs
        raise HealStateError(
            "`update` of healer.scan gets a state and the number of the update, and returns the "
            "new state, of the same structure, and its outputs, as a function for lax.scan does. "
            "Write `return state, outputs`, or `return state, None` for no outputs"
        )


class Scan:
    """One call of `Healer.scan`.

    Args:
        live: returns the live state.
        take_block: makes the state after a block the live state, with the records of its updates.
        blocks: the compiled blocks of the update.
    """

    def __init__(
        self,
        live: Callable[[], PyTree],
        take_block: Callable[[PyTree, BlockRecords], None],
        blocks: CompiledBlocks,
    ) -> None:
        self._live, self._take_block, self._blocks = live, take_block, blocks
        self._outputs: dict[int, Any] = {}
        """Number of each block's first update -> its outputs."""

    def run(self, first: int, count: int) -> None:
        """Dispatches a block.

        After a rollback, `first` is lower than before. The outputs of the undone updates are then
        replaced.

        Args:
            first: number of the block's first update.
            count: number of its updates.
        """
        state, outputs, records = self._blocks.run(self._live(), first, count)
        for number in [*self._outputs]:
            if number >= first:
                del self._outputs[number]
        self._outputs[first] = outputs
        self._take_block(state, records)

    def outputs(self) -> Any:
        """The outputs of all blocks, stacked, as from the program's own `lax.scan`."""
        if not self._outputs:
            return self._blocks.no_outputs(self._live())
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._outputs.values())
