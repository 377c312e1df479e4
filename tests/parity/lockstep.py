"""The same signals through several backends at once, compared bit for bit after every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals
from tests.core import fuzz
from tests.parity import backends

CHUNK = 50


def steps_equal(
    config: EngineConfig,
    traces: Iterable[Signals],
    against: Sequence[str],
    *,
    groups: int = 0,
    lanes: int = 0,
    reference: str = "numpy",
) -> int:
    """Runs each trace from a fresh state on every backend; all states and decisions have one value.

    Args:
        config: the policy.
        traces: each (steps, lanes) or, for `lanes` 0, (steps,).
        against: backends to compare with `reference`.
        groups: tensors, for per-tensor clipping.
        lanes: length of the batch axis; 0 for none.
        reference: the backend to compare with.

    Returns:
        Steps compared, one per lane.

    Raises:
        AssertionError: names the backend, the step and the leaf.
    """
    engine = Engine(config)
    runs = {name: backends.runner(name, engine) for name in (reference, *against)}
    compared = 0
    for trace in traces:
        fresh = engine.init(groups=groups, batch=(lanes,) if lanes else ())
        states = {name: backends.start(name, fresh) for name in runs}
        for start in range(0, backends.length(trace), CHUNK):
            chunk = fuzz.part(trace, start, start + CHUNK)
            seen = {}
            for name, run in runs.items():
                states[name], *seen[name] = run(states[name], chunk)
            for name in against:
                difference = first_difference(tuple(seen[reference]), tuple(seen[name]))
                assert difference is None, f"{reference} and {name} from step {start}: {difference}"
            compared += backends.length(chunk) * max(lanes, 1)
    return compared


def scalar(trace: Signals, lane: int) -> Signals:
    """One lane, as a trace of 0-d signals."""
    columns = (None if part is None else np.ascontiguousarray(part[:, lane]) for part in trace)
    return Signals(*columns)


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
