"""Policy-steps per second of a sweep in JAX, on all cores of this machine, on the recorded runs.

    PYTHONPATH=. python benchmarks/sweep.py [--variants 2304] [--repeats 5]

A policy-step is one row of one run, judged for one setting. Counted are real rows of real runs
(those of ../shared/traces with 200 rows at least; nothing is tiled, padding does not count), and
settings that all differ. From the least to the most of the policy:

detectors   the detectors of `pretraining`: alarm and sustained of each one, at every row. Runs
            without gradient norms have nothing for grad_spike and vanishing to judge: what judged
            what is printed. Varied are the numbers that a sweep varies by itself, of loss_spike
            and divergence; in a second line numbers of grad_spike and vanishing besides. (What no
            varied number enters is computed once for all settings; that is the point of it.)
sweep       what `healcore sweep` runs: detectors that some rule acts on, those rules, incidents:
            every recovery that is due and every skip. The scoring of the orders is in it.
engine      the whole decision: clipping, all rules, budgets, the LR multiplier.

Compiling is not in the figures (it is printed); converting every row's packed bits to NumPy is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.core.detectors import DETECTORS
from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals, observe
from healcore.jax.sweep_scan import JaxSweepScan
from healcore.plugins import sweep as variant_engine
from healcore.plugins.rows import as_record, judge_row
from healcore.plugins.sweep import PackedSeries
from healcore.policy import load
from healcore.tools.replay.scores import FEWEST, Label
from healcore.tools.sweep.scores import Costs, count_orders, series_events
from healcore.tools.sweep.series import Series, pack, series_of, unpack
from healcore.tools.sweep.space import Variants, draw, parse
from healcore.tools.traces import open_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
LANES = 384
SWEEP = "sweep"
VARIED = (
    "detect.loss_spike.z_threshold=2.5..6",
    "detect.loss_spike.evidence=1.5..4",
    "detect.divergence.rise=5..12",
    "detect.divergence.given_back=0.1..0.25",
    "detect.divergence.patience=36..90",
)
NORMS = (
    "detect.grad_spike.z_threshold=5..12",
    "detect.grad_spike.min_ratio=2..5",
    "detect.vanishing.threshold=1e-9..1e-6",
)


class Floor(NamedTuple):
    """One of the things that are timed."""

    name: str
    config: EngineConfig
    init: Callable[[EngineConfig], Any]
    step: Callable[..., tuple[Any, variant_engine.VariantDecision]]
    varied: tuple[str, ...]


def detectors_init(config: EngineConfig) -> tuple[Any, ...]:
    """The detectors' memories alone."""
    return tuple(DETECTORS[name].init(each) for name, each in config.detectors)


def detectors_step(
    config: EngineConfig, state: Any, signals: Signals, resumed: Any, *, xp: Any
) -> tuple[Any, variant_engine.VariantDecision]:
    """Every detector whose signal is there; the verdict needs both 32-bit words of each one."""
    never = resumed != resumed
    seen = observe(signals, never, xp=xp)
    memories, sustained, alarm = [], never, never
    for (name, thresholds), memory in zip(config.detectors, state, strict=True):
        module = DETECTORS[name]
        if all(getattr(seen, field) is not None for field in module.NEEDS):
            memory, reading = module.update(thresholds, memory, seen, xp=xp)
            # Exclusive or: no word can stand in for another.
            sustained, alarm = sustained ^ reading.sustained, alarm ^ reading.alarm
        memories.append(memory)
    return tuple(memories), variant_engine.VariantDecision(sustained, sustained, alarm)


def engine_step(
    config: EngineConfig, state: Any, signals: Signals, resumed: Any, *, xp: Any
) -> tuple[Any, variant_engine.VariantDecision]:
    """The engine; every field of the decision is needed."""
    del resumed
    state, found = judge_row(Engine(config), state, signals, xp=xp)
    record, due = as_record(found)
    enforced = (record.grad_scale != 1) ^ (record.lr_scale != 1) ^ record.skip
    return state, variant_engine.VariantDecision(
        due, due, enforced ^ (record.action != 0) ^ (record.cause != 0)
    )


def rounds(
    floor: Floor, variants: Variants, series: Sequence[Series], threads: int, repeats: int
) -> tuple[float, list[tuple[float, float]]]:
    """Seconds to compile, and (wall, CPU) seconds of each repeat over all series and settings."""
    scan = JaxSweepScan(
        floor.config,
        tuple(axis.place for axis in variants.axes),
        init=floor.init,
        step=floor.step,
    )
    grounds = [series_events(each, Label(each.trace, each.length, (), ())) for each in series]
    blocks = [
        variants.numbers(slice(start, start + LANES))
        for start in range(0, len(variants.values), LANES)
    ]

    def one(task: tuple[tuple[np.ndarray, ...], PackedSeries]) -> None:
        numbers, packed = task
        if floor.name != SWEEP:
            scan.run(numbers, packed)
            return
        orders_of = unpack(series, packed, *scan.run(numbers, packed))
        for i, orders in zip(packed.which, orders_of, strict=True):
            count_orders(series[i], grounds[i], orders, Costs())

    batches = pack(series)
    tasks = [(block, packed) for block in blocks for packed in batches]
    took = []
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        one_each = {packed.layout: packed for packed in batches}.values()
        list(pool.map(one, [(blocks[0], packed) for packed in one_each]))
        compiling = time.perf_counter() - began
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            list(pool.map(one, tasks))
            took.append((time.perf_counter() - wall, time.process_time() - cpu))
    return compiling, took


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--variants", type=int, default=2304, help=f"a multiple of {LANES}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if not TRACES.is_dir():
        print(f"no recorded runs: {TRACES} is not there", file=sys.stderr)
        return 2
    policy = load("pretraining")
    traces, _ = open_traces([str(path) for path in sorted(TRACES.rglob("*.csv"))])
    series = [s for trace in traces for s in series_of(trace, policy.engine())]
    series = [each for each in series if each.length >= FEWEST]
    rows = sum(each.length for each in series)
    normed = sum(int(has_norm(each).sum()) for each in series)
    config = policy.config()
    floors = (
        Floor("detectors", config, detectors_init, detectors_step, VARIED),
        Floor("detectors, all varied", config, detectors_init, detectors_step, VARIED + NORMS),
        Floor(
            SWEEP, variant_engine.trimmed(config), variant_engine.init, variant_engine.step, VARIED
        ),
        Floor("engine", config, lambda c: Engine(c).init(), engine_step, VARIED + NORMS),
    )
    count = arguments.variants
    print(f"{len(series)} runs, {rows:,} rows, of which {normed:,} with a gradient norm")
    print(f"{count:,} settings that differ; {arguments.threads} threads; load {os.getloadavg()[0]}")
    print(f"nonfinite, loss_spike, divergence: {count * rows / 1e6:,.1f} million policy-steps")
    print(f"grad_spike, vanishing: {count * normed / 1e6:,.1f} million of them\n")
    head = f"{'million policy-steps a second':30} {'best':>8} {'median':>8}"
    print(f"{head} {'per CPU s':>10} {'compile s':>10}")
    for floor in floors:
        axes = tuple(parse(policy, text) for text in floor.varied)
        variants = draw(policy, axes, count)
        if len(variants.values) % LANES:
            print(f"--variants must be a multiple of {LANES}", file=sys.stderr)
            return 2
        compiling, took = rounds(floor, variants, series, arguments.threads, arguments.repeats)
        work = rows * count / 1e6
        walls, cpus = zip(*took, strict=True)
        print(
            f"{floor.name:30} {work / min(walls):8.1f} {work / float(np.median(walls)):8.1f} "
            f"{work / min(cpus):10.1f} {compiling:10.1f}"
        )
    return 0


def has_norm(series: Series) -> np.ndarray:
    """Which rows have a gradient norm."""
    logged = [("grad_norm" in names) for names in series.layout.combinations]
    return np.array(logged)[series.rows.kind]


if __name__ == "__main__":
    raise SystemExit(main())
