"""Finds the first difference of two runs, compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def first_difference(a: Any, b: Any) -> str | None:
    """Describes the earliest difference of two trees of (steps, ...) arrays; None without one.

    Floats are compared by their bits: 0.0 and -0.0 differ. Dtypes and shapes count too, but for
    the width of integers, which a torch sum makes 64.
    """
    found: list[tuple[int, str]] = []
    for (name, x), (other, y) in zip(named(a), named(b), strict=True):
        if name != other:
            return f"{name} against {other}: not the same structure"
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name}: {x.dtype}{x.shape} against {y.dtype}{y.shape}"
        different = bits(x) != bits(y)
        if different.any():
            place = tuple(int(i) for i in np.argwhere(different)[0])
            count = int(different.any(axis=tuple(range(1, x.ndim))).sum())
            found.append(
                (place[0], f"{name}{list(place)}: {x[place]!r} against {y[place]!r}, {count} steps")
            )
    return None if not found else "; ".join(text for _, text in sorted(found)[:6])


def bits(x: np.ndarray) -> np.ndarray:
    """Floats as the integers that have their bits."""
    return x.view(np.int32) if x.dtype == np.float32 else x


def named(tree: Any, place: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The leaves with their names, depth first."""
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", range(len(tree)))
        for field, part in zip(fields, tree, strict=True):
            yield from named(part, f"{place}.{field}" if place else str(field))
    elif tree is not None:
        yield place, np.asarray(tree)
