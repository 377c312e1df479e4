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

Between two blocks the Healer reads the records, and may save, compare and roll back. `Scan` says
how the device avoids waiting for this work.

Not every leaf of a state can be traced. `_Split` says which leaves are constants of the compiled
program, such as the functions of an Equinox module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from healcore.console import first_of
from healcore.jax.driver.engine_readings import BlockRecords, block_records
from healcore.jax.driver.step_reader import any_replaced
from healcore.jax.heal_state import HealStateError
from healcore.jax.trees import Leaf, Path, PyTree, is_array, is_number, node_at

Update = Callable[[Any, Any], tuple[Any, Any]]
"""(state, number of the update) -> (state, outputs), as for `lax.scan`."""
_PROBED_UPDATE = np.int32(0)
"""Number of the update with which `_changed_numbers` traces the program's function."""


class _Traced:
    """Marks the leaves of a state that a block traces."""


class _Split(NamedTuple):
    """Which leaves of a state a block traces. All others are constants of the compiled program.

    Constants are functions and texts, and the Python numbers that the update returns unchanged. An
    example is `inference` of an Equinox module: the update branches by it, so it may not be traced.
    """

    structure: Any
    leaves: tuple[Any, ...]
    """`_Traced`, or the constant."""

    def traced(self, state: PyTree) -> Any:
        """The state with None in the place of each constant."""
        leaves, structure = jax.tree.flatten(state)
        if structure != self.structure:
            return state  # `lax.scan` says what differs
        traced = []
        for leaf, kind in zip(leaves, self.leaves, strict=True):
            if kind is _Traced:
                traced.append(leaf)
            else:
                traced.append(None)
        return structure.unflatten(traced)

    def whole(self, traced: PyTree) -> Any:
        """The state with its constants, from a result of `traced`."""
        new = iter(jax.tree.leaves(traced))
        leaves = []
        for kind in self.leaves:
            if kind is _Traced:
                leaves.append(next(new))
            else:
                leaves.append(kind)
        return self.structure.unflatten(leaves)


class Block(NamedTuple):
    """A block that was dispatched. The device may still compute its arrays.

    A block is a number of updates that the device runs without the host.
    """

    begins_with: PyTree
    """The state before its first update."""
    first: int
    """Number of its first update."""
    count: int
    """Number of its updates."""
    state: PyTree
    """The state after its last update."""
    outputs: PyTree
    """The outputs of its updates, stacked."""
    records: BlockRecords
    """What the host reads of each update."""


class CompiledBlocks:
    """The blocks of one update function, compiled once for each number of updates.

    `Healer.scan` replaces the program's own `lax.scan`. The Healer works between two blocks, so a
    block ends where the Healer saves or compares.

    Args:
        update: the program's function.
        paths: path of each HealState in the state.
        donate: whether a block reuses the memory of the state that it begins with.
    """

    def __init__(self, update: Update, paths: Sequence[Path], *, donate: bool) -> None:
        self._update, self._paths = update, paths
        self.donates = donate
        self._split: _Split | None = None
        donated: tuple[int, ...] = ()
        if donate:
            donated = (0,)
        self._compiled = jax.jit(self._block, donate_argnums=donated)
        self._is_first = True
        """Whether no block was dispatched yet."""

    def run(self, state: PyTree, first: int, count: int) -> Block:
        """Dispatches a block, and returns without waiting for the device.

        Args:
            state: the state before the block. Unusable afterwards if the block donates it.
            first: number of the first update, from 0.
            count: number of updates.
        """
        steps = np.arange(first, first + count, dtype=np.int32)
        split = self._split_of(state)
        traced = split.traced(state)
        if self._is_first:
            self._is_first = False
            traced = self._with_types_of_outputs(traced, steps)
        if self.donates:
            traced = _each_buffer_once(traced)
        traced, outputs, records = self._compiled(traced, steps)
        return Block(state, first, count, split.whole(traced), outputs, records)

    def no_outputs(self, state: PyTree) -> Any:
        """The outputs of `lax.scan` over zero updates, whose first axis has length 0.

        Args:
            state: a state of the run, for the shapes.
        """
        traced = self._split_of(state).traced(state)
        _, outputs, _ = jax.eval_shape(self._block, traced, np.zeros(1, np.int32))

        def empty(output: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((0, *output.shape[1:]), output.dtype)

        return jax.tree.map(empty, outputs)

    def _block(self, traced: PyTree, steps: Any) -> tuple[Any, Any, Any]:
        """The function that is compiled: returns the state after the block, outputs and records."""
        split = self._split
        assert split is not None

        def body(traced: PyTree, step: Any) -> tuple[Any, Any]:
            old = split.whole(traced)
            state, outputs = _checked_result(self._update(old, step), old)
            states = [node_at(state, path) for path in self._paths]
            return split.traced(state), (outputs, block_records(states))

        traced, (outputs, records) = lax.scan(body, traced, steps)
        return traced, outputs, records

    def _with_types_of_outputs(self, traced: PyTree, steps: np.ndarray) -> Any:
        """The state with the types that a block returns. `jnp.full(3, 0.1)` has a weak type.

        `lax.scan` converts weak types within the first block. Without this method the second block
        would begin with other types than the first one, and be compiled again.
        """
        if not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(traced)):
            return traced
        new, _, _ = jax.eval_shape(self._block, traced, steps)

        def converted(old: Any, new: Any) -> Any:
            is_weak = getattr(old, "weak_type", False)
            if is_weak and not new.weak_type:
                return lax.convert_element_type(old, new.dtype)
            return old

        return jax.tree.map(converted, traced, new)

    def _split_of(self, state: PyTree) -> _Split:
        """The split of the first state, to which all later states have to fit."""
        if self._split is None:
            leaves, structure = jax.tree.flatten(state)
            kinds = []
            for leaf in leaves:
                if is_array(leaf):
                    kinds.append(_Traced)
                else:
                    kinds.append(leaf)
            for i in self._changed_numbers(_Split(structure, tuple(kinds)), state):
                kinds[i] = _Traced
            self._split = _Split(structure, tuple(kinds))
        return self._split

    def _changed_numbers(self, split: _Split, state: PyTree) -> set[int]:
        """Indices of the Python numbers that the update replaces, as `count + 1` does."""
        numbers = {}
        for i, leaf in enumerate(split.leaves):
            if is_number(leaf):
                numbers[i] = leaf
        if not numbers:
            return set()
        found: list[Any] = []

        def probe(traced: PyTree) -> None:
            found[:] = jax.tree.leaves(
                self._update(split.whole(traced), jnp.int32(_PROBED_UPDATE))[0]
            )

        try:
            jax.eval_shape(probe, split.traced(state))
        except Exception:  # the update needs arrays, or the block will raise the same error
            return set(numbers)
        if len(found) != len(split.leaves):
            return set(numbers)
        changed = set()
        for i, number in numbers.items():
            if type(found[i]) is not type(number) or found[i] != number:
                changed.add(i)
        return changed


def _checked_result(result: Any, old: PyTree) -> tuple[Any, Any]:
    """The new state and the outputs, as `update` has returned them.

    Args:
        result: what `update` has returned.
        old: the state that `update` got.

    Raises:
        HealStateError: `result` is not a pair, or its state has other leaves than `old`.
    """
    rule = (
        "`update` of healer.scan gets a state and the number of the update, and returns the new "
        "state and its outputs, as a function for lax.scan does"
    )
    remedy = "Write `return state, outputs`, or `return state, None` for no outputs"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise HealStateError(f"{rule}, and it returned {_name_of(result)}. {remedy}")
    state, outputs = result
    before, after = _paths(old), _paths(state)
    missing = [f"state{path} is missing" for path in before if path not in after]
    added = [f"state{path} was not present" for path in after if path not in before]
    if missing or added:
        differences = first_of([*missing, *added], separator="; ")
        raise HealStateError(
            f"{rule}, and the state that it returned has another structure: {differences}. {remedy}"
        )
    return state, outputs


def _name_of(result: Any) -> str:
    """The type of a wrong result, and its length."""
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {len(result)}"
    return f"an object of type {type(result).__name__}"


def _paths(tree: PyTree) -> dict[str, None]:
    """The paths of the leaves, in flattening order."""
    return dict.fromkeys(keystr(path) for path, _ in tree_leaves_with_path(tree))


class ScanPrograms:
    """The compiled loops of `Healer.scan`, to compile each update once.

    Args:
        given: the leaves of the state that the program has passed to the Healer.
    """

    def __init__(self, given: list[Any]) -> None:
        self._given = given
        self.programs: dict[Any, CompiledBlocks] = {}
        """Identity of an update, structure of its state, and `donate` -> its blocks."""

    def is_first(self, state: PyTree) -> bool:
        """Whether a state is still the state that the program has passed to the Healer.

        Args:
            state: the state with which a loop begins.
        """
        leaves = jax.tree.leaves(state)
        return len(leaves) == len(self._given) and not any_replaced(leaves, self._given)

    def compiled(
        self, update: Update, structure: Any, paths: list[Any], *, donate: bool
    ) -> CompiledBlocks:
        """The blocks of an update, which are compiled when they are first called.

        Args:
            update: the program's function.
            structure: the structure of its state.
            paths: path of each HealState in the state.
            donate: whether a block reuses the memory of the state that it begins with.
        """
        key = id(update), structure, donate
        if key not in self.programs:
            # Keeps `update`, and so its id.
            self.programs[key] = CompiledBlocks(update, paths, donate=donate)
        return self.programs[key]


class _Driver(Protocol):
    """The part of `JaxDriver` that a scan uses."""

    @property
    def live(self) -> Any: ...

    def take_block(self, state: PyTree, records: BlockRecords) -> None: ...


class Scan:
    """One call of `Healer.scan`.

    The device need not wait while the Healer works between two blocks: the next block is dispatched
    before this work. If the work changes the state, as a rollback does, the block that was computed
    ahead is dropped. So a run has the same bits whether or not blocks are computed ahead:

        device   block 0 | block 1 | block 2 | ...
        host               work 0  | work 1  | ...

    Blocks that donate their state are not computed ahead, because the Healer saves this state
    between the blocks.

    Args:
        driver: holds the live state.
        blocks: the compiled blocks of the update.
    """

    def __init__(self, driver: _Driver, blocks: CompiledBlocks) -> None:
        self._driver, self._blocks = driver, blocks
        self._outputs: list[tuple[int, Any]] = []
        """Number of each block's first update, and its outputs."""
        self._ahead: Block | None = None
        """The next block, if it is computed already."""
        self._looks_ahead = not blocks.donates

    def run(self, first: int, count: int, next_count: int) -> None:
        """Dispatches a block, and the block after it.

        After a rollback, `first` is lower than before. The outputs of the undone updates are then
        replaced.

        Args:
            first: number of the block's first update.
            count: number of its updates.
            next_count: number of updates in the block after it, or 0.
        """
        block = self._ahead
        self._ahead = None
        if block is None or not self._is_next(block, first, count):
            block = self._blocks.run(self._driver.live, first, count)
        kept = [(number, outputs) for number, outputs in self._outputs if number < first]
        self._outputs = [*kept, (first, block.outputs)]
        self._driver.take_block(block.state, block.records)
        if next_count and self._looks_ahead:
            self._ahead = self._computed_ahead(first + count, next_count)

    def _is_next(self, block: Block, first: int, count: int) -> bool:
        """Whether a block that was computed ahead begins with the live state and this update."""
        is_same_part = (block.first, block.count) == (first, count)
        return is_same_part and block.begins_with is self._driver.live

    def _computed_ahead(self, first: int, count: int) -> Block | None:
        """Dispatches a block ahead, or returns None where the memory has no room for two states."""
        try:
            return self._blocks.run(self._driver.live, first, count)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._looks_ahead = False
            return None

    def outputs(self) -> Any:
        """The outputs of all blocks, stacked, as from the program's own `lax.scan`."""
        parts = [outputs for _, outputs in self._outputs]
        if not parts:
            return self._blocks.no_outputs(self._driver.live)
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(_joined, *parts)


def _joined(*parts: jax.Array) -> jax.Array:
    """The outputs of several blocks along the first axis."""
    return jnp.concatenate(parts)


def _each_buffer_once(traced: PyTree) -> Any:
    """The arrays of a state for a donation, which fails for an array that occurs twice.

    The second occurrence becomes a copy.
    """
    seen: set[int] = set()

    def owned(leaf: Leaf) -> Any:
        is_second = id(leaf) in seen
        seen.add(id(leaf))
        if isinstance(leaf, jax.Array) and is_second:
            return jnp.copy(leaf)
        return leaf

    return jax.tree.map(owned, traced)
