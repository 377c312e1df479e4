"""Runs all variants over all series, in blocks that keep every core busy."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from healcore import adapter_registry
from healcore.core.engine import EngineConfig
from healcore.core.signals import Signals
from healcore.plugins.rows import rolled_back
from healcore.plugins.sweep import WORD, PackedSeries, Place, SweepScan, step, variants_of
from healcore.tools.replay.scores import Label
from healcore.tools.sweep.scores import Costs, OrderCounts, count_orders
from healcore.tools.sweep.series import Series, pack, unpack
from healcore.tools.sweep.space import SweepError, Variants

BACKENDS = ("numpy", "jax")

WORTH_COMPILING = 5_000_000
"""Policy-steps from which JAX is the default; with fewer, NumPy ends before JAX has compiled."""

_LANES = {"jax": 384, "numpy": 4096}
"""Most variants of one block. In JAX their state stays in the near caches; 512 is a sixth slower,
since arrays of 2 KB conflict with each other in the caches."""

_WORDS = 1 << 24
"""Most words of orders that one call returns: very long runs get fewer variants at a time."""


def backend_for(policy_steps: int) -> str:
    """The default backend for this amount of work."""
    worth = policy_steps >= WORTH_COMPILING and importlib.util.find_spec("jax") is not None
    return "jax" if worth else "numpy"


class NumpySweepScan:
    """Runs an array of all variants in NumPy, row by row; slow beyond a few thousand at once."""

    def __init__(self, config: EngineConfig, places: tuple[Place, ...]) -> None:
        self._config, self._places = config, places

    def run(
        self, numbers: tuple[np.ndarray, ...], packed: PackedSeries
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `SweepScan.run`."""
        engine = variants_of(self._config, self._places, numbers)
        rows, layout = packed.rows, packed.layout
        shape = len(rows.start), len(numbers[0])
        words = np.zeros(shape, np.uint32)
        skipped, recovered = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        column = {name: rows.signals[:, i] for i, name in enumerate(layout.signals)}
        state = engine.init()
        for group in np.flatnonzero(rows.stop > rows.start):
            if rows.fresh[group]:
                state = engine.init()
            for row in range(rows.start[group], rows.stop[group]):
                if rows.resumed[row]:
                    state = rolled_back(engine, state, state, xp=np)
                names = layout.combinations[rows.kind[row]]
                signals = Signals(**{name: column[name][row] for name in names})
                state, decision = step(engine, state, signals, xp=np)
                words[group] |= np.asarray(decision.order, np.uint32) << (row % WORD)
                if rows.own[row]:
                    skipped[group] += decision.skip
                    recovered[group] += decision.first
        return words, skipped, recovered


def scan_of(config: EngineConfig, places: tuple[Place, ...], backend: str) -> SweepScan:
    """A scan of the variants of the base policy's whole config.

    Raises SweepError for an unknown backend, or if JAX has no CPU here; MissingExtraError if JAX is
    not installed.
    """
    if backend not in BACKENDS:
        raise SweepError(f"the backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "numpy":
        return NumpySweepScan(config, places)
    try:
        return adapter_registry.find("jax", "sweep_scan")(config, places)
    except RuntimeError as error:
        raise SweepError(
            f"JAX has no CPU backend in this process ({error}): add cpu to JAX_PLATFORMS, or take "
            "--backend numpy"
        ) from error


def run(
    scan: SweepScan,
    variants: Variants,
    series: Sequence[Series],
    events: Sequence[Label],
    costs: Costs,
    *,
    backend: str,
    advance: Callable[[int], None],
) -> list[OrderCounts]:
    """Counts the orders of every variant on every series; `events` has each series' events.

    `advance` is called with the policy-steps just done.
    """
    count = len(variants.values)
    batches = pack(series)
    longest = max(len(packed.rows.start) for packed in batches)
    blocks = -(-count // max(16, min(_LANES[backend], _WORDS // longest)))
    lanes = -(-count // blocks)
    lanes = -(-lanes // 16) * 16 if backend == "jax" else lanes
    starts = range(0, count, lanes)

    def one(task: tuple[int, PackedSeries]) -> list[OrderCounts]:
        start, packed = task
        numbers = variants.numbers(slice(start, start + lanes))
        real = len(numbers[0])
        # All blocks have one shape, so that one program serves all; padding is not counted.
        padded = tuple(np.pad(each, (0, lanes - real), mode="edge") for each in numbers)
        words = scan.run(padded if backend == "jax" else numbers, packed)
        found = unpack(series, packed, *words)
        counted = []
        for i, orders in zip(packed.which, found, strict=True):
            counted.append(count_orders(series[i], events[i], orders.first(real), costs))
            advance(real * series[i].length)
        return counted

    tasks = [(start, packed) for start in starts for packed in batches]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(cores if backend == "jax" else 1) as pool:
        done = list(pool.map(one, tasks))
    parts: list[list[OrderCounts]] = [[] for _ in series]
    for (_, packed), counted in zip(tasks, done, strict=True):
        for i, each in zip(packed.which, counted, strict=True):
            parts[i].append(each)
    return [_side_by_side(each) for each in parts]


def _side_by_side(parts: Sequence[OrderCounts]) -> OrderCounts:
    arrays = (np.concatenate(columns) for columns in zip(*(p[1:] for p in parts), strict=True))
    return OrderCounts(parts[0].rows, *arrays)
