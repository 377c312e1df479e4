"""Finds out which of several equal parts of a state are trained, by their movement.

An EMA, a target network and a teacher have the structure of the parameters, and an optimizer state
does not name the part of the state that it trains. The movement between two copies of the state
shows it. An average moves towards the parameters, the parameters move ahead of it, and a frozen
copy does not move:

    frozen       f                            no movement: the share counts as infinite
    average         a ---> a'                 nearer to the parameters: a share close to 1
    parameters              p ----------> p'  away from the average: usually a share below 0

The share is the part of a movement that has brought the tensors nearer to another part. The parts
with the smallest shares are trained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Part = tuple[str, ...]
"""Paths of the tensors of a part of the state."""
_MIN_DIFFERENCE = 1e-3
"""Smallest difference of two shares that separates an average from the parameters."""


class PartGroup(NamedTuple):
    """Parts of the state with equal shapes, and how many of these parts are trained.

    For example the parameters, and an average of them in the same state: two parts, one trained.
    """

    parts: Sequence[Part]
    """The parts. Their movement has to show which of them are trained."""
    trained: int
    """Number of trained parts: as many as optimizers have parameters of these shapes."""


def mixed_groups(
    candidates: Iterable[Iterable[Part]], tensors: Mapping[str, Any]
) -> list[PartGroup]:
    """Groups the parts by their shapes, and returns the groups of which not all parts are trained.

    Args:
        candidates: for each optimizer, the parts that may be its parameters.
        tensors: path -> tensor, of all these parts.

    Returns:
        The groups for `untrained`. Empty if each part is trained, as in most runs.
    """
    groups: dict[Any, Counter[Part]] = {}
    for parts in candidates:
        for part in parts:
            shapes = tuple(jnp.shape(tensors[name]) for name in part)
            groups.setdefault(shapes, Counter())[part] += 1
    mixed = []
    for counts in groups.values():
        group = PartGroup(list(counts), max(counts.values()))
        if len(group.parts) > group.trained:
            mixed.append(group)
    return mixed


def untrained(
    groups: Sequence[PartGroup], before: Mapping[str, Any], now: Mapping[str, Any]
) -> frozenset[str] | None:
    """Finds the tensors that are not trained, by the movement of the parts.

    An average moves towards the parameters, so it comes nearer to another part by most of its
    movement. The parameters move ahead of it. A frozen copy does not move.

    Args:
        groups: result of `mixed_groups`.
        before: path -> earlier tensor.
        now: path -> current tensor, several steps later.

    Returns:
        Paths of these tensors, or None if the movement does not show them clearly.
    """
    found: list[str] = []
    for parts, trained in groups:
        shares = {part: _share_towards_others(part, parts, before, now) for part in parts}
        # The parts with the smallest shares are trained.
        last_trained, first_average = sorted(shares.values())[trained - 1 : trained + 1]
        # Written with `not`, so that NaN ends here too.
        if not first_average - last_trained > _MIN_DIFFERENCE:
            return None
        for part in parts:
            if shares[part] >= first_average:
                found += part
    return frozenset(found)


def _share_towards_others(
    part: Part, parts: Sequence[Part], before: Mapping[str, Any], now: Mapping[str, Any]
) -> float:
    """Largest share of a part's movement that has brought it nearer to another part.

    Infinite for a part that has not moved.
    """

    def distance(tensors: Mapping[str, Any], other: Part) -> jax.Array:
        squares: Any = 0
        for name, other_name in zip(part, other, strict=True):
            gap = jnp.asarray(tensors[name], jnp.float32) - now[other_name]
            squares += jnp.square(gap).sum()
        return jnp.sqrt(squares)

    approaches = []
    for other in parts:
        if other != part:
            approaches.append(distance(before, other) - distance(now, other))
    largest = jnp.stack(approaches).max()
    moved, nearer = map(float, jax.device_get((distance(before, part), largest)))
    if not moved:
        return math.inf
    return nearer / moved
