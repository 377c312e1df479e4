"""The step records in the optimizer state that the host has not read yet, in ring buffers.

A `lax.scan` takes many steps in one dispatch, and the host gets the state only after the last one.
So each step writes its record into a ring buffer. A step with an order also writes it into a
second, short one: no order is lost in a dispatch with more steps than the first one holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STEPS = 32
"""Steps that are kept by default."""
ORDERS = 8
"""Steps with an order that are kept in addition. One incident has very few."""


def check_records(steps: Any) -> int:
    """The number of steps to keep; ValueError unless it is a whole number from 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"records is a whole number from 1, the steps of one dispatch, got {steps!r}: 1 where "
            "each step is a call of its own"
        )
    return steps


def init(steps: int, record: Any) -> jax.Array:
    """Int32 (steps + ORDERS, words) before the first step: every row is `record`."""
    return jnp.tile(record, (steps + ORDERS, 1))


def write(records: Any, record: Any, step: Any, orders: Any, ordered: Any) -> jax.Array:
    """The ring buffers with one more step.

    Args:
        records: int32 (steps + ORDERS, words).
        record: int32 (words,), from `state_layout.record`.
        step: int32, steps judged, this one included.
        orders: int32, number of steps with an order before this one.
        ordered: bool, whether this step has an order.
    """
    kept = records.shape[0] - ORDERS
    place = (step - 1) % kept
    records = lax.dynamic_update_slice(records, record[None], (place, jnp.zeros_like(place)))
    place = jnp.where(ordered, kept + orders % ORDERS, place)
    return lax.dynamic_update_slice(records, record[None], (place, jnp.zeros_like(place)))


def last(records: np.ndarray, step: int) -> np.ndarray:
    """The newest record, after `step` steps."""
    return records[(step - 1) % (records.shape[0] - ORDERS)]


class StepCounts(NamedTuple):
    """How many steps an engine had judged at one moment."""

    steps: int
    """All steps; a rollback sets the number back."""
    orders: int
    """Steps with an order, also those that a rollback has undone."""


def between(
    records: np.ndarray, before: StepCounts, after: StepCounts
) -> tuple[list[np.ndarray], int]:
    """The records of the steps between two moments without a rollback, oldest first.

    Args:
        records: what the state held at the later one.
        before: the earlier moment.
        after: the later one.

    Returns:
        The records, and how many steps have none (steps with an order only if over ORDERS).
    """
    kept = records.shape[0] - ORDERS
    first = max(before.steps, after.steps - kept)
    orders = range(max(before.orders, after.orders - ORDERS), after.orders)
    rows = [records[kept + order % ORDERS] for order in orders]
    rows = [row for row in rows if row[0] <= first]
    rows += [records[step % kept] for step in range(first, after.steps)]
    return rows, after.steps - before.steps - len(rows)
