"""Rows per second of `healcore replay`.

    python benchmarks/replay.py [--rows 500000]

Writes a CSV log with losses, gradient norms and a spike every thousand rows, reads it, and replays
the default policy over it with its lines of JSON.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from healcore.tools.replay import replay
from healcore.tools.traces import open_traces


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows per CPU second.")
    parser.add_argument("--rows", type=int, default=500_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        path = log(Path(folder) / "run.csv", rows)
        start = time.process_time()
        (trace,), _ = open_traces([str(path)])
        read = time.process_time()
        with open(os.devnull, "w") as out:
            out.writelines(replay(trace, "default").lines())
        end = time.process_time()
    print(f"{rows:,} rows: read in {read - start:.2f} s, replayed in {end - read:.2f} s")


if __name__ == "__main__":
    main()
