"""Packs the engine's state into two vectors, and the records of the last steps into ring buffers.

Each leaf costs an argument, a buffer and a result of a jitted step (a tiny step on 2 cores: 145 us
for 108 leaves, 45 us for two vectors). With `lax.scan` the host receives the state only after many
steps, so each step writes its record into a ring buffer. A step with an order for the host also
writes its record into a second ring buffer. A dispatch with more steps than the first buffer holds
therefore loses no order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from healcore.core import step_record
from healcore.core.engine import Engine
from healcore.core.step_record import StepRecord

SCHEMA = 8
"""Version of this layout."""
STEPS = 32
"""Default size of the first ring buffer, in steps."""
ORDERS = 8
"""Size of the second ring buffer, in steps with an order."""

_RECORD = step_record.leaf_paths()
_RECORD_INTS, _RECORD_FLOATS = _RECORD[: step_record.INTS], _RECORD[step_record.INTS :]
_FLAGS = ("incident.open", "last.decision.skip")
_COUNTS = ("clips", "skips", "alarms", "rollbacks", "lr_cuts")
_HEAD = (*_RECORD_INTS, *(f"tally.{name}" for name in _COUNTS), "change_expected")
"""Integers whose position is the same for every policy. So is the position of a record's floats."""


class Header(NamedTuple):
    """The integers that precede the engine's state. Each is int32, 0-d."""

    schema: Any
    policy_high: Any
    policy_low: Any
    """Fingerprint of the policy, 64 bits with `policy_high`. Both are 0 for a policy of arrays."""
    loss_seen: Any
    """1 after the first finite loss, else 0."""
    orders: Any
    """Number of steps with an order so far."""
    edit: Any
    """Number of the Healer's last edit of the state. A step keeps the number, so a state computed
    from an older state has an older number."""


_ENGINE = len(Header._fields)
"""Index of the first integer of the engine's state."""


class StateLayout:
    """The positions of a state's arrays in the two vectors.

    `groups` is the number of tensors for per-tensor clipping, else 0.
    """

    def __init__(self, engine: Engine, groups: int) -> None:
        self.template = engine.init(groups=groups)
        high, low = np.frombuffer(bytes.fromhex(engine.fingerprint or "0" * 16), ">i4")
        self.header = Header(*(np.int32(each) for each in (SCHEMA, high, low, 0, 0, 0)))
        self._like = _by_path(self.template)
        floats = {name for name, leaf in self._like.items() if leaf.dtype == np.float32}
        self._floats = _reorder(_RECORD_FLOATS, [name for name in self._like if name in floats])
        self._ints = _reorder(_HEAD, [name for name in self._like if name not in floats])
        self.floats = sum(self._like[name].size for name in self._floats)
        self.ints = sum(self._like[name].size for name in self._ints) + _ENGINE

    def pack(self, state: Any, header: Header) -> tuple[jax.Array, jax.Array]:
        """Packs floats as float32 (`floats`,), and integers and flags as int32 (`ints`,)."""
        leaves = _by_path(state)
        floats = [jnp.ravel(jnp.asarray(leaves[name], jnp.float32)) for name in self._floats]
        ints = [*header, *(leaves[name] for name in self._ints)]
        return jnp.concatenate(floats), jnp.concatenate(
            [jnp.ravel(jnp.asarray(each, jnp.int32)) for each in ints]
        )

    def unpack(self, floats: Any, ints: Any) -> Any:
        """Unpacks the EngineState. Its arrays are NumPy arrays if the vectors are."""
        found = {}
        for names, vector, start in ((self._floats, floats, 0), (self._ints, ints, _ENGINE)):
            for name in names:
                like = self._like[name]
                part = _slice(vector, start, like.size)
                part = part.reshape(part.shape[:-1] + like.shape)
                found[name] = part != 0 if like.dtype == np.bool_ else part
                start += like.size
        return jax.tree.unflatten(
            jax.tree.structure(self.template), [found[name] for name in self._like]
        )


def header(ints: Any) -> Header:
    """Reads the `Header` from a vector of integers, for any policy."""
    return Header(*(_read_element(ints, i) for i in range(_ENGINE)))


def fingerprint(header: Header) -> str:
    """The `Engine.fingerprint` of a state's policy."""
    return np.array([header.policy_high, header.policy_low], ">i4").tobytes().hex()


def step(ints: Any) -> Any:
    """The number of steps that the engine has judged, int32."""
    return _read_element(ints, _ENGINE + _HEAD.index("step"))


def with_change_expected(ints: Any) -> jax.Array:
    """Sets the engine's flag that a change is expected."""
    return _with(ints, _ENGINE + _HEAD.index("change_expected"), 1)


def with_edit(ints: Any, number: int) -> jax.Array:
    """Sets the number of an edit."""
    return _with(ints, Header._fields.index("edit"), number)


def head(floats: Any, ints: Any) -> SimpleNamespace:
    """Reads the part of an EngineState whose position is the same for every policy: 0-d arrays."""
    found = {path: _read_element(floats, i) for i, path in enumerate(_RECORD_FLOATS)}
    found |= {path: _read_element(ints, i) for i, path in enumerate(_HEAD, start=_ENGINE)}
    root = SimpleNamespace()
    for path, number in found.items():
        node, (*parents, name) = root, path.split(".")
        for parent in parents:
            node = vars(node).setdefault(parent, SimpleNamespace())
        setattr(node, name, number != 0 if path in _FLAGS else number)
    return root


def _with(ints: Any, index: int, value: int) -> jax.Array:
    # An indexed update fails outside of jit on a mesh of several processes.
    return jnp.where(np.arange(ints.shape[-1]) == index, np.int32(value), ints)


def _slice(vector: Any, start: int, size: int) -> Any:
    if isinstance(vector, np.ndarray):
        return vector[..., start : start + size]
    return lax.slice_in_dim(vector, start, start + size, axis=-1)


def _read_element(vector: Any, index: int) -> Any:
    found = _slice(vector, index, 1)
    return found.reshape(found.shape[:-1])


def _by_path(state: Any) -> dict[str, Any]:
    """Path with dots -> array of an EngineState."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _reorder(front: tuple[str, ...] | list[str], names: list[str]) -> list[str]:
    return [*front, *(name for name in names if name not in front)]


# -- step records -------------------------------------------------------------------------------


class StepCounts(NamedTuple):
    """The numbers of steps that an engine has judged, at one moment."""

    steps: int
    """Number of steps, excluding steps that a rollback has undone."""
    orders: int
    """Number of steps with an order, including steps that a rollback has undone."""


def check_records(steps: Any) -> int:
    """Returns `steps`. Raises ValueError unless it is a whole number >= 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"records is a whole number >= 1, the number of steps in one dispatch, got {steps!r}: "
            "use 1 if each step is a separate call"
        )
    return steps


def record(floats: Any, ints: Any, bad_update: Any = False) -> jax.Array:
    """The last step's record, int32 (elements,): see `unpack_record`."""
    last = jnp.reshape(jnp.asarray(bad_update, jnp.int32), (1,))
    head = lax.slice(ints, (_ENGINE,), (_ENGINE + len(_RECORD_INTS),))
    numbers = lax.slice(floats, (0,), (len(_RECORD_FLOATS),))
    return jnp.concatenate([head, lax.bitcast_convert_type(numbers, jnp.int32), last])


def unpack_record(row: np.ndarray, engine: str) -> StepRecord:
    """The record of one step; the last element is `StepRecord.bad_update`."""
    return step_record.unpack(row[:-1], engine)._replace(bad_update=bool(row[-1]))


def init_records(steps: int, record: Any) -> jax.Array:
    """Initial ring buffers, int32 (steps + ORDERS, elements). Every row is `record`."""
    return jnp.tile(record, (steps + ORDERS, 1))


class Places(NamedTuple):
    """The rows of the ring buffers to which a step writes its record. Each is int32, 0-d."""

    newest: Any
    order: Any
    """The row in the second ring buffer, or `newest` for a step without an order."""


def places(records: Any, step: Any, orders: Any, ordered: Any) -> Places:
    """The places of the record of one step.

    `step` is the number of steps including this step. `orders` is the number of steps with an order
    before this step.
    """
    kept = records.shape[0] - ORDERS
    newest = (step - 1) % kept
    return Places(newest, jnp.where(ordered, kept + orders % ORDERS, newest))


def write_record(records: Any, record: Any, places: Places) -> jax.Array:
    """Writes the record of one step into the ring buffers, int32 (steps + ORDERS, elements)."""
    for place in places:
        records = lax.dynamic_update_slice(records, record[None], (place, jnp.zeros_like(place)))
    return records


def last_record(records: Any, step: Any) -> Any:
    """The newest record after `step` steps."""
    return records[(step - 1) % (records.shape[0] - ORDERS)]


def records_between(
    records: np.ndarray, before: StepCounts, after: StepCounts
) -> tuple[list[np.ndarray], int]:
    """The records of the steps between two moments without a rollback, oldest first.

    Also returns the number of steps without a record. These have no order, unless more than ORDERS
    steps have one. `records` are read at the later moment.
    """
    kept = records.shape[0] - ORDERS
    first = max(before.steps, after.steps - kept)
    orders = range(max(before.orders, after.orders - ORDERS), after.orders)
    rows = [records[kept + order % ORDERS] for order in orders]
    rows = [row for row in rows if row[0] <= first]
    rows += [records[step % kept] for step in range(first, after.steps)]
    return rows, after.steps - before.steps - len(rows)
