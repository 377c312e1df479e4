"""Timing contenders against each other in one process: interleaved rounds, paired ratios.

These machines are noisy, so an absolute time means little. In each round every contender runs once,
in an order that changes from round to round; a ratio is the median over rounds of one contender's
time over the reference's time in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Contender:
    """One way of doing the same work."""

    name: str
    step: Callable[[], Any]
    """The timed work; must have finished when it returns."""
    prepare: Callable[[], Any] = lambda: None
    """Untimed preparation before each step."""
    steps: int = 1
    """Steps of one call of `step`. Times are of one step."""


@dataclass
class Timing:
    """One contender's result."""

    name: str
    median_ms: float
    ratio: float
    """Median over rounds of this step over the reference's step."""
    extra_ms: float = 0.0
    """Median over rounds of this step less the reference's step, in milliseconds."""


def interleave(
    contenders: Sequence[Contender],
    *,
    reference: str,
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Times all contenders, round by round.

    Args:
        contenders: at least the reference.
        reference: name of the contender that ratios are over.
        rounds: timed rounds.
        warmup: untimed rounds before them (compilation, caches, optimizer state).
        clock: seconds, as `time.perf_counter` or `time.process_time`.
    """
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(warmup + rounds):
        shift = number % len(contenders)
        for each in (*contenders[shift:], *contenders[:shift]):
            each.prepare()
            start = clock()
            each.step()
            if number >= warmup:
                times[each.name].append((clock() - start) / each.steps)
    base = times[reference]
    return [
        Timing(
            name,
            statistics.median(taken) * 1e3,
            statistics.median(a / b for a, b in zip(taken, base, strict=True)),
            statistics.median(a - b for a, b in zip(taken, base, strict=True)) * 1e3,
        )
        for name, taken in times.items()
    ]


def machine() -> str:
    """The machine in one line: processor, cores, operating system, Python."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, {platform.system()}, Python {platform.python_version()}"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run at all?")
    return parser


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the results with the machine's name and load, unless `path` is None."""
    if path is None:
        return
    made: dict[str, Any] = {"machine": machine(), "load": round(os.getloadavg()[0], 1)}
    path.write_text(json.dumps(made | result, indent=2) + "\n")
    print(f"\nwritten to {path}")
