"""Copies to the host what it reads of the engines: the numbers of steps, their rows, and norms.

The copy begins right after a dispatch, and the host does not wait for the copy. The copy has to
begin at once, because the next dispatch may donate the state, and so delete the arrays. All arrays
are copied as one vector, because each copy has a fixed cost:

    engine A     records (r, 16)   norms (k,)
    engine B     records (r, 16)   norms (m,)
                      |
                 _pack, one compiled function
                      v
    one vector   [ rows of A | norms of A | rows of B | norms of B ]    int32, floats by their bits
                      |
                 copied in the background; `read` waits for it and takes it apart
                      v
    on the host  an EngineReading for each engine

A block of `Healer.scan` has many updates, of each of which the compiled block returns these arrays
(`block_records`). They are copied as they are, because a block is long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from healcore.jax.heal_state import HealState, steps_judged

Result = TypeVar("Result")


class EngineReading(NamedTuple):
    """The part of one engine's state that the host reads.

    Two readings, before and after a dispatch, show which steps the dispatch has had.
    """

    step: int
    """Number of steps judged."""
    ring: np.ndarray
    """The records of the last steps, see `HealState.heal_records`."""
    norms: np.ndarray
    """float32 (n,): norm of each gradient leaf at the last step."""

    def record(self, step: int) -> np.ndarray:
        """The record of one step in the ring.

        Args:
            step: number of the step, from 1. It has to be one of the last ``len(ring)`` steps,
                because a later step overwrites an older row.

        Returns:
            int32 (16,), floats by their bits, see `unpack_record`.
        """
        return self.ring[(step - 1) % len(self.ring)]


Readings = Callable[[], list[list[EngineReading]]]
"""Waits for the copy, and returns each engine's `EngineReading` after each update of a dispatch."""


class CachedResult(Generic[Result]):
    """A function without arguments that is computed at the first call.

    `functools.cache` would copy the names of each function, in every step.

    Args:
        compute: computes the result.
    """

    def __init__(self, compute: Callable[[], Result]) -> None:
        self._compute: Callable[[], Result] | None = compute
        self._result: Any = None

    def __call__(self) -> Result:
        """The result, which the first call computes."""
        if self._compute is not None:
            self._result = self._compute()
            self._compute = None
        return self._result


def start_read(states: Sequence[HealState]) -> Readings:
    """Begins to copy each engine's `EngineReading` after one update.

    The driver calls this function after each dispatch. The next dispatch may then donate the
    states: the copy no longer needs their arrays.

    A program that has waited for its loss has waited for these arrays too. They are then copied at
    once, which takes a quarter of the time of one more compiled function.

    Args:
        states: the HealState of each engine.

    Returns:
        A function that waits for the copy and returns a list with one entry, because a dispatch
        without a block is one update: the `EngineReading` of each engine.
    """
    arrays = []
    for state in states:
        arrays.append((state.heal_records, state.heal_leaf_norms))
    if _are_ready(arrays):
        engines = []
        for rows, norms in arrays:
            engines.append(_reading_of(np.array(rows), np.array(norms)))
        return lambda: [engines]
    shapes = []
    for rows, norms in arrays:
        shapes.append((rows.shape, norms.size))
    copied = _pack(arrays)
    copied.copy_to_host_async()

    def read() -> list[list[EngineReading]]:
        packed = np.asarray(copied)
        results = []
        for shape, tensors in shapes:
            end = math.prod(shape)
            rows = packed[:end].reshape(shape)
            norms = packed[end : end + tensors].view(np.float32)
            results.append(_reading_of(rows, norms))
            packed = packed[end + tensors :]
        return [results]

    return CachedResult(read)


def _are_ready(arrays: list[tuple[Any, Any]]) -> bool:
    """Whether each array was computed, and is on one device only."""
    for pair in arrays:
        for array in pair:
            if not array.is_ready():
                return False
            if not isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
                return False
    return True


def _reading_of(rows: np.ndarray, norms: np.ndarray) -> EngineReading:
    """The reading of a `HealState.heal_records` and of the norms of its tensors."""
    return EngineReading(int(steps_judged(rows)), rows, norms)


class EngineRecords(NamedTuple):
    """The arrays of one engine's `EngineReading`, with a first axis over the updates of a block.

    The ring of a state holds the records of one update only. A block has any number of updates, so
    the compiled block returns these arrays for each of its updates.
    """

    step: Any
    """int32 (updates,): number of steps judged after each update."""
    rows: Any
    """int32 (updates, records, n): `HealState.heal_records` after each update."""
    norms: Any
    """float32 (updates, leaves): norm of each gradient at the last step of each update."""


BlockRecords = list[EngineRecords]
"""The records of each engine, on the device."""


def block_records(states: Sequence[HealState]) -> BlockRecords:
    """The arrays that the host reads of the states after one update of a block.

    Called while a block is traced, once in the body of its `lax.scan`.

    Args:
        states: the HealState of each engine after the update, traced.

    Returns:
        The records of each engine, without the axis over updates, which `lax.scan` adds.
    """
    found = []
    for state in states:
        rows = state.heal_records
        found.append(EngineRecords(steps_judged(rows), rows, state.heal_leaf_norms))
    return found


def start_read_of_block(records: BlockRecords) -> Readings:
    """Begins to copy each engine's `EngineReading` after each update of a block.

    Args:
        records: what the compiled block has returned.

    Returns:
        A function that waits for the copies and returns the readings, oldest update first.
    """
    for array in jax.tree.leaves(records):
        array.copy_to_host_async()

    def read() -> list[list[EngineReading]]:
        engines = [EngineRecords(*map(np.asarray, engine)) for engine in records]
        readings = []
        for i in range(len(engines[0].step)):
            of_update = []
            for engine in engines:
                step = int(engine.step[i])
                of_update.append(EngineReading(step, engine.rows[i], engine.norms[i]))
            readings.append(of_update)
        return readings

    return CachedResult(read)


@jax.jit
def _pack(states: list[tuple[Any, ...]]) -> jax.Array:
    """Packs the arrays into one int32 vector. Floats keep their bits."""
    parts = []
    for rows, norms in states:
        parts += [rows.ravel(), jax.lax.bitcast_convert_type(norms, jnp.int32)]
    return jnp.concatenate(parts)
