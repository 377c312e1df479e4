"""All variants over all series, in blocks that keep every core busy."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from healcore.core.engine import EngineConfig
from healcore.extras import require
from healcore.tools.sweep import judging
from healcore.tools.sweep.keys import Place, SweepError
from healcore.tools.sweep.numpy_scan import NumpyScan
from healcore.tools.sweep.orders import Orders
from healcore.tools.sweep.reel import Reel, pack
from healcore.tools.sweep.scoring import Costs, Ground, Tally, tally
from healcore.tools.sweep.series import Series
from healcore.tools.sweep.space import Variants

BACKENDS = ("numpy", "jax")

WORTH_COMPILING = 5_000_000
"""Policy-steps from which JAX is the default: below, NumPy is done before JAX has compiled."""

_LANES = {"jax": 384, "numpy": 4096}
"""Most variants of one block. In JAX their state stays in the near caches; 512 is a sixth slower,
since arrays of 2 KB fall on one another there."""

_WORDS = 1 << 24
"""Most words of orders that one call gives back: of a very long run fewer variants at a time."""


class Scan(Protocol):
    """The variants of one policy on one backend."""

    def orders(self, numbers: tuple[np.ndarray, ...], reel: Reel) -> list[Orders]:
        """Runs the variants over each series of the reel.

        Args:
            numbers: (variants,) for each varied place.
            reel: the series.
        """
        ...


def backend_for(policy_steps: int) -> str:
    """The backend for so much work where the user names none."""
    worth = policy_steps >= WORTH_COMPILING and importlib.util.find_spec("jax") is not None
    return "jax" if worth else "numpy"


def scan_of(config: EngineConfig, places: tuple[Place, ...], backend: str) -> Scan:
    """A scan of the policy's variants.

    Args:
        config: the base policy's, whole.
        places: where the varied numbers stand.
        backend: one of `BACKENDS`.

    Raises:
        SweepError: there is no such backend, or JAX has no CPU here.
        healcore.extras.MissingExtraError: JAX is not installed.
    """
    if backend not in BACKENDS:
        raise SweepError(f"the backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    trimmed = judging.trimmed(config)
    if backend == "numpy":
        return NumpyScan(trimmed, places)
    require("jax", "jax")
    # By name, at run time: healcore itself imports no framework.
    module = importlib.import_module("healcore.jax.sweep_scan")
    try:
        return module.JaxScan(trimmed, places)
    except RuntimeError as error:
        raise SweepError(
            f"JAX has no CPU backend in this process ({error}): add cpu to JAX_PLATFORMS, or take "
            "--backend numpy"
        ) from error


def run(
    scan: Scan,
    variants: Variants,
    series: Sequence[Series],
    grounds: Sequence[Ground],
    costs: Costs,
    *,
    backend: str,
    advance: Callable[[int], None],
) -> list[Tally]:
    """Counts what every variant does on every series.

    Args:
        scan: from `scan_of`.
        variants: the settings.
        series: the rows.
        grounds: what each is scored by.
        costs: see `scoring`.
        backend: whose scan it is.
        advance: called with the policy-steps just done.
    """
    count = len(variants.values)
    reels = pack(series)
    longest = max(len(reel.groups.start) for reel in reels)
    blocks = -(-count // max(16, min(_LANES[backend], _WORDS // longest)))
    lanes = -(-count // blocks)
    lanes = -(-lanes // 16) * 16 if backend == "jax" else lanes
    starts = range(0, count, lanes)

    def one(task: tuple[int, Reel]) -> list[Tally]:
        start, reel = task
        numbers = variants.numbers(slice(start, start + lanes))
        real = len(numbers[0])
        # Every block has one shape, so that one program serves; what pads the last is not counted.
        padded = tuple(np.pad(each, (0, lanes - real), mode="edge") for each in numbers)
        found = scan.orders(padded if backend == "jax" else numbers, reel)
        counted = []
        for i, orders in zip(reel.which, found, strict=True):
            counted.append(tally(series[i], grounds[i], orders.first(real), costs))
            advance(real * series[i].length)
        return counted

    tasks = [(start, reel) for start in starts for reel in reels]
    with ThreadPoolExecutor(_threads() if backend == "jax" else 1) as pool:
        done = list(pool.map(one, tasks))
    parts: list[list[Tally]] = [[] for _ in series]
    for (_, reel), counted in zip(tasks, done, strict=True):
        for i, each in zip(reel.which, counted, strict=True):
            parts[i].append(each)
    return [_side_by_side(each) for each in parts]


def _threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _side_by_side(parts: Sequence[Tally]) -> Tally:
    """One series' counts of all blocks."""
    arrays = (np.concatenate(columns) for columns in zip(*(p[2:] for p in parts), strict=True))
    return Tally(parts[0].events, parts[0].rows, *arrays)
