"""The steps that the host has not read yet, in the optimizer state.

A `lax.scan` takes many steps in one dispatch, and the host sees the state only after the last of
them. So each step leaves a record in a ring. A step with an order leaves one in a second, short
ring as well: in a dispatch with more steps than the first ring holds no order is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STEPS = 32
"""Steps that are kept unless the user says how many one dispatch takes."""
ORDERS = 8
"""Steps with an order that are kept beyond those. One incident brings very few."""


def checked(steps: Any) -> int:
    """Raises ValueError unless it is a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"records is a whole number from 1, the steps of one dispatch, got {steps!r}: 1 where "
            "each step is a call of its own"
        )
    return steps


def init(steps: int, record: Any) -> jax.Array:
    """Int32 (steps + ORDERS, words), before the first step: all as `record` says."""
    return jnp.tile(record, (steps + ORDERS, 1))


def write(records: Any, record: Any, step: Any, orders: Any, ordered: Any) -> jax.Array:
    """The rings with one more step.

    Args:
        records: int32 (steps + ORDERS, words).
        record: int32 (words,), from `packing.record`.
        step: int32, steps judged, this one included.
        orders: int32, steps with an order before this one.
        ordered: bool, this is one.
    """
    kept = records.shape[0] - ORDERS
    place = (step - 1) % kept
    records = lax.dynamic_update_slice(records, record[None], (place, jnp.zeros_like(place)))
    place = jnp.where(ordered, kept + orders % ORDERS, place)
    return lax.dynamic_update_slice(records, record[None], (place, jnp.zeros_like(place)))


def last(records: np.ndarray, step: int) -> np.ndarray:
    """The newest record, after `step` steps."""
    return records[(step - 1) % (records.shape[0] - ORDERS)]


class Counts(NamedTuple):
    """How far an engine was at one moment."""

    steps: int
    """Judged; a rollback sets them back."""
    orders: int
    """Steps with an order, of those before a rollback too."""


def between(records: np.ndarray, before: Counts, after: Counts) -> tuple[list[np.ndarray], int]:
    """The records of the steps between two moments without a rollback, oldest first.

    Args:
        records: what the state held at the later one.
        before: the earlier moment.
        after: the later one.

    Returns:
        The records, and how many steps are missing (with an order only if those were over ORDERS).
    """
    kept = records.shape[0] - ORDERS
    first = max(before.steps, after.steps - kept)
    orders = range(max(before.orders, after.orders - ORDERS), after.orders)
    rows = [records[kept + order % ORDERS] for order in orders]
    rows = [row for row in rows if row[0] <= first]
    rows += [records[step % kept] for step in range(first, after.steps)]
    return rows, after.steps - before.steps - len(rows)
