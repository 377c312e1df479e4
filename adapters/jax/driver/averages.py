"""Finds averages and frozen copies of the parameters in a state, which no optimizer trains.

An EMA, a target network and a teacher have the structure of the parameters, and an optimizer state
does not name the part that it trains. The movement of the parts shows it: an average moves towards
the parameters, which move ahead of it, and a frozen copy does not move.
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
_CLEAR = 1e-3
"""Smallest difference of two shares by which an average differs from the parameters."""


class Rivals(NamedTuple):
    """Parts with tensors of the same shapes, and how many of these parts are trained."""

    parts: Sequence[Part]
    trained: int


def rivals(candidates: Iterable[Iterable[Part]], tensors: Mapping[str, Any]) -> list[Rivals]:
    """The parts of which optimizers train some. `candidates` are the parts that fit each one."""
    groups: dict[Any, Counter[Part]] = {}
    for part in (part for fitting in candidates for part in fitting):
        shapes = tuple(jnp.shape(tensors[name]) for name in part)
        groups.setdefault(shapes, Counter())[part] += 1
    found = [Rivals(list(parts), max(parts.values())) for parts in groups.values()]
    return [each for each in found if len(each.parts) > each.trained]


def averages(
    among: Sequence[Rivals], before: Mapping[str, Any], now: Mapping[str, Any]
) -> frozenset[str] | None:
    """Paths of the tensors that are not trained, or None if the movement does not show them.

    Args:
        among: result of `rivals`.
        before: path -> earlier tensor.
        now: path -> current tensor, several steps later.
    """
    found: list[str] = []
    for parts, trained in among:
        shares = {part: _share_towards_others(part, parts, before, now) for part in parts}
        last, first = sorted(shares.values())[trained - 1 : trained + 1]
        if not first - last > _CLEAR:  # also if NaN
            return None
        found += [name for part in parts if shares[part] >= first for name in part]
    return frozenset(found)


def _share_towards_others(
    part: Part, parts: Sequence[Part], before: Mapping[str, Any], now: Mapping[str, Any]
) -> float:
    """Largest share of a part's movement that has brought it nearer to another, or Inf at rest."""

    def distance(tensors: Mapping[str, Any], other: Part) -> jax.Array:
        pairs = zip(part, other, strict=True)
        gaps = [jnp.asarray(tensors[a], jnp.float32) - now[b] for a, b in pairs]
        return jnp.sqrt(sum(jnp.square(gap).sum() for gap in gaps))

    others = [each for each in parts if each != part]
    nearer = jnp.stack([distance(before, each) - distance(now, each) for each in others]).max()
    moved, nearer = map(float, jax.device_get((distance(before, part), nearer)))
    return nearer / moved if moved else math.inf
