"""Rows per CPU second of `healcore replay`, by backend.

    python benchmarks/replay.py [--rows 200000]

Writes a CSV log with losses, gradient norms and a spike every thousand rows, and replays the
default policy over it: reading, judging and making the lines of JSON. NumPy and torch get fewer
rows. JAX compiles in the first replay; the second has the compiled loop already.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from healcore.tools.replay import replay
from healcore.tools.replay.decided import decided_line
from healcore.tools.traces import open_traces

SHARES = {"numpy": 10, "torch": 100, "jax": 1}
"""One in this many of the rows goes to a backend."""


def log(path: Path, rows: int) -> Path:
    random = np.random.default_rng(0)
    loss = 3 + 0.03 * random.standard_normal(rows)
    norm = 0.5 * np.exp(0.2 * random.standard_normal(rows))
    spike = np.arange(rows) % 1000 < 20
    spike[:1000] = False
    loss[spike] += 4
    norm[spike] *= 10
    lines = [f"{step},{a:.5f},{b:.5f}" for step, (a, b) in enumerate(zip(loss, norm, strict=True))]
    path.write_text("\n".join(["step,loss,grad_norm", *lines, ""]))
    return path


def seconds(path: Path, backend: str) -> tuple[float, float]:
    """CPU seconds of (first pass over the file, replay with its lines of JSON)."""
    start = time.process_time()
    (trace,), _ = open_traces([str(path)])
    trace.survey()
    read = time.process_time()
    with open(os.devnull, "w") as out:
        for row in replay(trace, "default", backend=backend):
            out.write(decided_line(trace.name, "default", row))
    return read - start, time.process_time() - read


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows per second, by backend.")
    parser.add_argument("--rows", type=int, default=200_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        for backend, share in SHARES.items():
            count = max(1000, rows // share)
            path = log(Path(folder) / f"{backend}.csv", count)
            first, took = seconds(path, backend)
            again = seconds(path, backend)[1]
            print(
                f"{backend:6} {count:9,} rows: first pass {count / first:11,.0f} rows/s, replay "
                f"{count / took:9,.0f} rows/s, once more {count / again:9,.0f} rows/s"
            )


if __name__ == "__main__":
    main()
