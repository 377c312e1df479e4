"""The numbers of an engine as one row of int32, and a ring of such rows: `HealState.heal_engine`.

An EngineState of `default` has about fifty arrays of one number. Each array of a state costs a
jitted step 2 to 5 us (2 CPU cores), as much as the whole engine. So all numbers are one row of
int32, in which a float stands by its bits, and a bool as 0 or 1. A step unpacks the row into an
EngineState, judges, and packs the new row.

One row, whose fixed parts are at both ends, so that their columns are the same for each policy:

    column 0..1          2      3           4..7            8 = STEP ...     16 ... 21
         +-------------+------+-----------+---------------+----------------+------+---------
         | fingerprint | edit | loss_seen | decision:     | record: step,  | tally| other
         | of policy   |      |           | skip action   | onset, ...     | (5)  | integers ...
         |             |      |           | cause depth   | (8 integers)   |      |
         +-------------+------+-----------+---------------+----------------+------+---------

    column                         -10..-9        -8..-1
                  ---------------+--------------+-------------------------------+
                  ... other      | decision:    | record: grad_scale, lr_scale, |
                      floats     | grad_scale   | loss, ... lr                  |
                                 | lr_scale     | (8 floats)                    |
                  ---------------+--------------+-------------------------------+

The decision stands in the row twice: the record has the decision that the policy orders, which is
also a part of the EngineState. The columns 4 to 7, -10 and -9 have the decision to enforce, which
is neutral in observe mode.

The array has ``1 + records`` rows. Row 0 is the current state. The other rows are a ring of the
last steps, which a Healer reads after a dispatch of several steps: row ``1 + (i - 1) % records`` is
the row after step i. With `records` of 4, after 6 steps:

    row 0     step 6    the current state, which the next step reads and replaces
    row 1     step 5
    row 2     step 6    the same row as row 0, until the Healer edits row 0
    row 3     step 3    the next step writes here
    row 4     step 4

An edit of the Healer (a limit, an announced change) changes row 0 only.

Windows and numbers per tensor are arrays of their own, `HealState.heal_windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from healcore.core.decision import Decision
from healcore.core.engine import Engine, EngineState, Tally
from healcore.core.engine.state import record_numbers
from healcore.core.step_record import RECORD_FIELDS, RECORD_INTS
from healcore.jax.one_kernel import is_one_kernel

FINGERPRINT = slice(2)
"""Columns of `Engine.fingerprint`, or 0 for a policy of arrays."""
EDIT = 2
"""Column of the number of the Healer's last edit."""
LOSS_SEEN = 3
"""Column of the flag whether a loss was finite."""
HEAD_SIZE = 4
"""Number of columns in the head: the fingerprint, the edit and the flag."""
_DECISION_INTS = ("skip", "action", "cause", "rollback_depth")
_DECISION_FLOATS = ("grad_scale", "lr_scale")
_FLOAT_COUNT = len(RECORD_FIELDS) - RECORD_INTS
"""Number of floats in a record."""

STEP = HEAD_SIZE + len(_DECISION_INTS)
"""Column of the number of steps judged. It begins the integers of a record."""
_TALLY = STEP + RECORD_INTS
CHANGE_EXPECTED = _TALLY + len(Tally._fields)
"""Column of `EngineState.change_expected`, the first of the other integers."""


class RowLayout(NamedTuple):
    """The places of the leaves of one policy's EngineState in a HealState.

    The index of a leaf is its place in ``jax.tree.leaves(state)``. The layout follows from the
    policy alone, so it is made again in each trace, and is not a part of the state.
    """

    structure: Any
    """The tree structure of the EngineState."""
    leaves: list[np.ndarray]
    """The leaves of the first state."""
    ints: list[int]
    """Indices of the integers and flags, in the order of the columns from `STEP` on."""
    floats: list[int]
    """Indices of the floats, in the order of the last columns."""
    windows: list[int]
    """Indices of the arrays with elements."""

    @classmethod
    def of(cls, engine: Engine, tensors: int | None) -> RowLayout:
        """The layout for a number of tensors of a per-tensor policy, or None."""
        if engine.fingerprint is None:  # its numbers may be traced, and must not be kept
            return cls._make_of(engine, tensors)
        return _known_layout(engine, tensors)

    @classmethod
    def _make_of(cls, engine: Engine, tensors: int | None) -> RowLayout:
        """See `of`."""
        leaves, structure = jax.tree.flatten(engine.init(groups=tensors or 0))
        places: EngineState = structure.unflatten(range(len(leaves)))
        record = record_numbers(places)
        first_ints = [*record[:RECORD_INTS], *places.tally, places.change_expected]
        last_floats = [*record[RECORD_INTS:]]
        other_ints = []
        other_floats = []
        windows = []
        for i, leaf in enumerate(leaves):
            if leaf.ndim:
                if leaf.size:
                    windows.append(i)
            elif i in first_ints or i in last_floats:
                continue
            elif leaf.dtype == np.float32:
                other_floats.append(i)
            else:
                other_ints.append(i)
        return cls(structure, leaves, first_ints + other_ints, other_floats + last_floats, windows)

    @property
    def width(self) -> int:
        """Length of a row."""
        return STEP + len(self.ints) + len(_DECISION_FLOATS) + len(self.floats)

    def column(self, leaf: int) -> int:
        """Column, counted from the right (-1 is the last one), of a float of the EngineState.

        Args:
            leaf: index of the float among the leaves.
        """
        place = self.floats.index(leaf) - len(self.floats)
        return place if place >= -_FLOAT_COUNT else place - len(_DECISION_FLOATS)

    def pack(self, head: Sequence[Any], state: Any, decision: Decision, xp: Any) -> Any:
        """Makes a row, int32 (width,).

        Args:
            head: the first columns, 0-d.
            state: the EngineState.
            decision: the decision to enforce.
            xp: `jax.numpy` or `numpy`.
        """
        leaves = jax.tree.leaves(state)
        factors = [getattr(decision, name) for name in _DECISION_FLOATS]
        ints = [*head, *(getattr(decision, name) for name in _DECISION_INTS)]
        ints += [leaves[i] for i in self.ints]
        floats = [leaves[i] for i in self.floats[:-_FLOAT_COUNT]]
        floats += factors
        floats += [leaves[i] for i in self.floats[-_FLOAT_COUNT:]]
        ints = [xp.asarray(each, np.int32) for each in ints]
        floats = [xp.asarray(each, np.float32) for each in floats]
        if xp is jnp and not is_one_kernel():
            return _chained([*ints, *(_view(each, np.int32) for each in floats)])
        return xp.concatenate([xp.stack(ints), _view(xp.stack(floats), np.int32)])

    def unpack(self, row: Any, windows: Sequence[Any]) -> EngineState:
        """Makes the EngineState of a row and of its windows; the reverse of `pack`.

        Args:
            row: int32 (width,), of JAX (traced or not) or NumPy.
            windows: the arrays of `windows_of`, of the same library.

        Returns:
            The EngineState in arrays of this library.
        """
        leaves: list[Any] = list(self.leaves)  # an empty window has no other value
        ints = _numbers(row[STEP : STEP + len(self.ints)])
        floats = _numbers(_view(row[STEP + len(self.ints) :], np.float32))
        del floats[-_FLOAT_COUNT - len(_DECISION_FLOATS) : -_FLOAT_COUNT]
        for i, number in zip(self.ints, ints, strict=True):
            leaves[i] = number != 0 if leaves[i].dtype == np.bool_ else number
        for i, number in zip(self.floats, floats, strict=True):
            leaves[i] = number
        for i, window in zip(self.windows, windows, strict=True):
            leaves[i] = window
        return self.structure.unflatten(leaves)

    def windows_of(self, state: EngineState) -> tuple[Any, ...]:
        """The arrays with elements of an EngineState, which are not in its row."""
        leaves = jax.tree.leaves(state)
        return tuple(leaves[i] for i in self.windows)


@lru_cache(maxsize=16)
def _known_layout(engine: Engine, tensors: int | None) -> RowLayout:
    """See `RowLayout.of`. A run reads the same engine at each save."""
    return RowLayout._make_of(engine, tensors)


def current_row(rows: Any) -> Any:
    """Row 0 of `HealState.heal_engine`, without a kernel of its own within `jit`."""
    return lax.index_in_dim(rows, 0, axis=-2, keepdims=False)


def with_row(rows: jax.Array, row: jax.Array, step: jax.Array) -> jax.Array:
    """The rows after a step.

    Args:
        rows: the rows before the step, int32 (1 + records, width).
        row: the new row, which becomes row 0 and the row of its step in the ring.
        step: number of the step, int32 0-d, from 1.
    """
    update = lax.expand_dims(row, (0,))
    zero = np.int32(0)  # a Python number would be an int64 where the program has enabled x64
    rows = lax.dynamic_update_slice(rows, update, (zero, zero))
    place = ring_row(step, rows)
    return lax.dynamic_update_slice(rows, update, (place, zero), allow_negative_indices=False)


def ring_row(step: Any, rows: Any) -> Any:
    """Index of the row of a step in the ring, from 1 to the number of records.

    Args:
        step: number of the step, from 1, int32 0-d of JAX (traced or not) or NumPy.
        rows: `HealState.heal_engine` of one state.
    """
    count = np.int32(len(rows) - 1)
    if isinstance(step, jax.Array):
        return lax.rem(step - 1, count) + 1
    return (step - 1) % count + 1


def steps_judged(rows: Any) -> Any:
    """The number of steps that the engine has judged, in a `HealState.heal_engine`."""
    return rows[..., 0, STEP]


def decision_of(rows: jax.Array, group_scale: Any) -> Decision:
    """The decision of the last step, as it was to be enforced.

    Args:
        rows: the rows of one state, or of several with a leading axis.
        group_scale: `HealState.heal_group_scale`, which is not a part of the rows.
    """
    row = current_row(rows)
    ints = jnp.unstack(row[..., HEAD_SIZE:STEP], axis=-1)
    floats = _view(row[..., -_FLOAT_COUNT - len(_DECISION_FLOATS) : -_FLOAT_COUNT], np.float32)
    numbers: dict[str, Any] = dict(zip(_DECISION_INTS, ints, strict=True))
    numbers |= zip(_DECISION_FLOATS, jnp.unstack(floats, axis=-1), strict=True)
    numbers["skip"] = numbers["skip"] != 0
    return Decision(**numbers, group_scale=group_scale)


def records(rows: Any) -> Any:
    """The ring as int32 (..., records, n): `RECORD_FIELDS` of each step, floats by their bits."""
    ring = rows[..., 1:, :]
    return jnp.concatenate([ring[..., STEP:_TALLY], ring[..., -_FLOAT_COUNT:]], axis=-1)


def record(row: np.ndarray) -> np.ndarray:
    """The record of a row, as a row of `records`."""
    return np.concatenate((row[STEP:_TALLY], row[-_FLOAT_COUNT:]))


def newest(rows: jax.Array) -> dict[str, jax.Array]:
    """The record and the tally of the newest step in the ring of one state, by name.

    An edit of the Healer changes row 0, and not the ring.
    """
    step = steps_judged(rows) + (len(rows) - 1)  # one round later, so that step 0 has a row too
    row = lax.dynamic_index_in_dim(rows, ring_row(step, rows), keepdims=False)
    names = (*RECORD_FIELDS[:RECORD_INTS], *Tally._fields)
    values = dict(zip(names, row[STEP:CHANGE_EXPECTED], strict=True))
    values |= zip(RECORD_FIELDS[RECORD_INTS:], _view(row[-_FLOAT_COUNT:], np.float32), strict=True)
    return values | {"why": values["why"] != 0}


def _chained(numbers: Sequence[jax.Array]) -> jax.Array:
    """A vector of int32 numbers, as a chain of selections, which XLA compiles as one kernel.

    Outside of `one_kernel`, XLA makes a kernel of each number of a concatenation.
    """
    vector = jnp.zeros(len(numbers), jnp.int32)
    index = lax.iota(np.int32, len(numbers))
    for i, number in enumerate(numbers):
        vector = lax.select(index == i, lax.broadcast(number, vector.shape), vector)
    return vector


def _view(vector: Any, dtype: Any) -> Any:
    """The bits of a vector as another dtype of 32 bits."""
    if isinstance(vector, np.ndarray):
        return vector.view(dtype)
    return lax.bitcast_convert_type(vector, dtype)


def _numbers(part: Any) -> list[Any]:
    """The numbers of a vector, 0-d."""
    if isinstance(part, np.ndarray):
        return [part[i : i + 1].reshape(()) for i in range(len(part))]
    return list(jnp.unstack(part))
