"""`StateLayout`: packs the engine's state into two vectors, and unpacks it.

A state of a hundred scalars costs a jitted step more than its arithmetic does: each leaf is a
separate argument, buffer and result (a tiny step on 2 cores: 145 us for 108 leaves, 45 us for two
vectors and the same engine).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from healcore.core import step_record, tree
from healcore.core.engine import Engine

SCHEMA = 2
"""Version of this layout, the first of the integers."""

_RECORD = step_record.leaf_names()
_RECORD_INTS, _RECORD_FLOATS = _RECORD[: step_record.INTS], _RECORD[step_record.INTS :]
"""What the host reads of every step, at the head of the integers and of the floats."""
_CHANGE_EXPECTED = "change_expected"
_COUNTS = ("tally_clips", "tally_skips", "tally_alarms", "tally_rollbacks", "tally_lr_cuts")

_MARKS = ("schema", "policy_high", "policy_low", "loss_seen", "orders")
"""The first integers, before the engine's: the fields of `Marks`."""
_HEAD = (*_RECORD_INTS, *_COUNTS, _CHANGE_EXPECTED)


class Marks(NamedTuple):
    """What the integers hold besides the engine's state. int32, 0-d each."""

    schema: Any
    policy_high: Any
    policy_low: Any
    """Fingerprint of the policy, 64 bits; both 0 for a policy without (its numbers are arrays)."""
    loss_seen: Any
    """1 as soon as there was a finite loss."""
    orders: Any
    """Number of steps with an action so far."""


class ArraySlot(NamedTuple):
    """The position of one array of the engine's state in its vector."""

    name: str
    """Its path, joined by underscores: `clip_mean`."""
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class StateLayout:
    """The position of every array of a state, for one policy and number of tensors.

    Args:
        engine: the policy's engine.
        groups: number of tensors, for per-tensor clipping.
    """

    def __init__(self, engine: Engine, groups: int) -> None:
        self.template = engine.init(groups=groups)
        high, low = _fingerprint_ints(engine.fingerprint)
        self.marks = Marks(*(np.int32(each) for each in (SCHEMA, high, low, 0, 0)))
        self._names = [name for name, _ in _named(self.template, "")]
        leaves = dict(_named(self.template, ""))
        floats = {name: leaf for name, leaf in leaves.items() if leaf.dtype == np.float32}
        ints = {name: leaf for name, leaf in leaves.items() if name not in floats}
        self._floats, self.floats = _slots(floats, _RECORD_FLOATS, 0)
        self._ints, self.ints = _slots(ints, _HEAD, len(_MARKS))

    def pack(self, state: Any, marks: Marks) -> tuple[jax.Array, jax.Array]:
        """The floats, float32 (`floats`,), and the integers and flags, int32 (`ints`,)."""
        leaves = dict(_named(state, ""))
        floats = [jnp.ravel(jnp.asarray(leaves[name], jnp.float32)) for name in self._floats]
        ints = [jnp.ravel(jnp.asarray(leaves[name], jnp.int32)) for name in self._ints]
        head = [jnp.ravel(jnp.asarray(each, jnp.int32)) for each in marks]
        return jnp.concatenate(floats), jnp.concatenate(head + ints)

    def unpack(self, floats: Any, ints: Any) -> Any:
        """The core's EngineState; of NumPy arrays if those are."""
        found = {}
        for slots, vector in ((self._floats, floats), (self._ints, ints)):
            for name, slot in slots.items():
                part = _slice(vector, slot.start, slot.size)
                part = part.reshape(part.shape[:-1] + slot.shape)
                found[name] = part != 0 if slot.dtype == np.bool_ else part
        parts = iter(self._names)
        return tree.map_leaves(lambda _: found[next(parts)], self.template)


def marks(ints: Any) -> Marks:
    """The `Marks` in a vector of integers, of any policy."""
    return Marks(*(_one(ints, i) for i in range(len(_MARKS))))


def record(floats: Any, ints: Any) -> jax.Array:
    """The last step's record, as `step_record.unpack` reads it."""
    head = lax.slice(ints, (len(_MARKS),), (len(_MARKS) + len(_RECORD_INTS),))
    numbers = lax.slice(floats, (0,), (len(_RECORD_FLOATS),))
    return jnp.concatenate([head, lax.bitcast_convert_type(numbers, jnp.int32)])


def step(ints: Any) -> Any:
    """Steps that the engine has judged, int32."""
    return _one(ints, len(_MARKS) + _HEAD.index("step"))


def with_change_expected(ints: Any) -> jax.Array:
    """The integers with the engine's flag set that a change is expected."""
    flag = np.zeros(ints.shape[-1], np.int32)
    flag[len(_MARKS) + _HEAD.index(_CHANGE_EXPECTED)] = 1
    return ints | flag  # an indexed update fails outside of jit on a mesh of several processes


def head(floats: Any, ints: Any) -> dict[str, Any]:
    """The numbers whose position does not depend on the policy: 0-d arrays by name."""
    found = {name: _one(floats, i) for i, name in enumerate(_RECORD_FLOATS)}
    found |= {name: _one(ints, i) for i, name in enumerate(_HEAD, start=len(_MARKS))}
    for name in ("incident_open", "last_decision_skip"):
        found[name] = found[name] != 0
    return found


def _slice(vector: Any, start: int, size: int) -> Any:
    if isinstance(vector, np.ndarray):
        return vector[..., start : start + size]
    return lax.slice_in_dim(vector, start, start + size, axis=-1)


def _one(vector: Any, index: int) -> Any:
    found = _slice(vector, index, 1)
    return found.reshape(found.shape[:-1])


def _slots(
    leaves: dict[str, Any], first: Sequence[str], start: int
) -> tuple[dict[str, ArraySlot], int]:
    """The slots of the arrays, and the length of their vector."""
    slots = {}
    for name in [*first, *(name for name in leaves if name not in first)]:
        leaf = leaves[name]
        slots[name] = ArraySlot(name, start, leaf.shape, leaf.dtype)
        start += leaf.size
    return slots, start


def _fingerprint_ints(fingerprint: str | None) -> tuple[int, int]:
    """Sixteen hex digits as two int32; 0, 0 for None."""
    high, low = np.frombuffer(bytes.fromhex(fingerprint or "0" * 16), ">i4")
    return int(high), int(low)


def _named(nested: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every array with its path, in the order of `tree.leaves`."""
    if nested is None:
        return
    if isinstance(nested, tuple):
        names = getattr(nested, "_fields", range(len(nested)))
        for name, part in zip(names, nested, strict=True):
            yield from _named(part, f"{prefix}_{name}" if prefix else str(name))
    else:
        yield prefix, nested
