"""Policy-steps per second of a sweep in JAX, on all cores of this machine, on the recorded runs.

    PYTHONPATH=. python benchmarks/sweep.py [--variants 768] [--repeats 4] [--backend jax]

A policy-step is one row of one run, judged for one setting. Only real rows of real runs count
(those of ../shared/traces with 200 rows at least; nothing is tiled, padding does not count), and
all settings differ. What runs is what `healcore sweep` runs: every recovery that is due and every
skip, and the scores of the orders. First the numbers of `loss_spike` and `divergence` are varied,
then those of `grad_spike` and `vanishing` besides.

The first round compiles and is printed apart. Figures per CPU second hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

from healcore.policy import load
from healcore.tools.replay.scores import MIN_ROWS, Label
from healcore.tools.sweep.scores import Costs, own_events
from healcore.tools.sweep.search import scan_all, scan_of
from healcore.tools.sweep.series import series_of
from healcore.tools.sweep.space import draw, parse
from healcore.tools.traces import open_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
VARIED = (
    "detect.loss_spike.z_threshold=2.5..6",
    "detect.loss_spike.evidence=1.5..4",
    "detect.divergence.rise=5..12",
    "detect.divergence.patience=36..90",
)
NORMS = (
    "detect.grad_spike.z_threshold=5..12",
    "detect.grad_spike.min_noise=0.1..0.4",
    "detect.vanishing.threshold=1e-9..1e-6",
)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--variants", type=int, default=768, help="settings")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--backend", default="jax")
    arguments = parser.parse_args()
    if not TRACES.is_dir():
        print(f"no recorded runs: {TRACES} is not there", file=sys.stderr)
        return 2
    policy = load("pretraining")
    traces, _ = open_traces([str(path) for path in sorted(TRACES.rglob("*.csv"))])
    series = [s for trace in traces for s in series_of(trace, policy.engine())]
    series = [each for each in series if each.length >= MIN_ROWS]
    events = [own_events(each, Label(each.trace, each.length, (), ())) for each in series]
    rows = sum(each.length for each in series)
    print(f"{len(series)} runs, {rows:,} rows; {arguments.variants:,} settings that differ")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]}\n")
    head = f"{'million policy-steps a second':30} {'best':>8} {'median':>8}"
    print(f"{head} {'per CPU s':>10} {'first s':>10}")
    for name, varied in (("loss detectors varied", VARIED), ("all varied", VARIED + NORMS)):
        variants = draw(policy, tuple(parse(policy, text) for text in varied), arguments.variants)
        places = tuple(axis.place for axis in variants.axes)
        scan = scan_of(policy.config(), places, arguments.backend)
        took = []
        for _ in range(arguments.repeats + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            scan_all(
                scan,
                variants,
                series,
                events,
                Costs(),
                backend=arguments.backend,
                advance=lambda _: None,
            )
            took.append((time.perf_counter() - wall, time.process_time() - cpu))
        walls, cpus = zip(*took[1:], strict=True)
        work = rows * len(variants.values) / 1e6
        print(
            f"{name:30} {work / min(walls):8.1f} {work / float(np.median(walls)):8.1f} "
            f"{work / min(cpus):10.1f} {took[0][0]:10.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
