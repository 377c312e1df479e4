"""Runs healcore on one GPU: decisions, waits, CUDA graphs, precision, rollbacks, trainers, cost.

Each check runs in a process of its own, and the results are written after each. Without CUDA they
run on the CPU, smaller, those that need CUDA say so, and nothing is written without --json.

    python -m benchmarks.gpu_kit [--json FILE] [CHECK ...]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

CHECKS = {
    "decisions": "attached",
    "cuda_graph": "attached",
    "launches": "attached",
    "grad_scaler": "attached",
    "bfloat16": "attached",
    "rollback": "healed",
    "snapshots": "healed",
    "out_of_memory": "healed",
    "protect": "in_jax",
    "heal_zclip": "in_jax",
    "jax_rollback": "in_jax",
    "huggingface": "trainers",
    "fsdp2": "trainers",
}
"""The module of each check, in the order in which they run."""

COST = {"cost_25M": 25_000_000, "cost_124M": 124_000_000, "cost_1B": 1_000_000_000}
"""Parameters of `benchmarks/step_overhead.py`, last: the largest may not fit in the time."""

TOTAL_S, ONE_S = 510, 180
"""Of all checks, and of each."""
RESULTS = Path("benchmarks/results/gpu.json")
RESULT = "result: "


def run_one(name: str) -> None:
    """Runs a check in this process, and prints its result as the last line."""
    module = importlib.import_module(f"benchmarks.gpu_kit.{CHECKS[name]}")
    try:
        found = {"outcome": "passed", **getattr(module, name)()}
    except Exception as error:
        traceback.print_exc()
        found = {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}
    print(RESULT + json.dumps(found))


def command(name: str, folder: Path) -> list[str]:
    """The program of a check."""
    if name not in COST:
        return [sys.executable, "-m", "benchmarks.gpu_kit", "--here", name]
    import torch

    cuda = torch.cuda.is_available()
    size = ["--params", str(COST[name]), "--device", "cuda"] if cuda else ["--quick"]
    options = ["--framework", "torch", "--rounds", "21" if cuda else "3"]
    file = Path(__file__).parents[1] / "step_overhead.py"
    return [sys.executable, str(file), *size, *options, "--json", str(folder / f"{name}.json")]


def run(name: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """The result of a check, run in a process of its own."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command(name, folder), timeout=limit_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = error.stderr if isinstance(error.stderr, str) else ""
        return {
            "outcome": "failed",
            "error": f"not done after {limit_s:.0f} s",
            "log": output[-2000:],
        }
    measured = folder / f"{name}.json"
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if measured.exists():
        found = {"outcome": "passed", **json.loads(measured.read_text())}
    elif lines:
        found = json.loads(lines[-1].removeprefix(RESULT))
    else:
        found = {"outcome": "failed", "error": f"ended with {done.returncode}"}
    if found["outcome"] == "failed":
        found["log"] = done.stderr[-4000:]
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Runs the checks, writes the results, and exits with 1 if one has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join([*CHECKS, *COST]))
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {RESULTS}")
    parser.add_argument("--here", metavar="CHECK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_one(options.here)
        return
    if unknown := {*options.checks} - {*CHECKS, *COST}:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    from benchmarks.gpu_kit.device import CUDA, name_of_device

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    file = options.json or (RESULTS if CUDA else None)
    everything = [*CHECKS, *COST] if CUDA else [*CHECKS, next(iter(COST))]
    result: dict[str, Any] = {"device": name_of_device(), "checks": {}}
    print(result["device"])
    ends = time.monotonic() + TOTAL_S
    with tempfile.TemporaryDirectory() as folder:
        for name in options.checks or everything:
            left = ends - time.monotonic()
            found: dict[str, Any] = {"outcome": "skipped", "why": f"{TOTAL_S} s are over"}
            if left > 10:
                found = run(name, Path(folder), min(ONE_S, left))
            result["checks"][name] = found
            why = found.get("error") or found.get("why") or ""
            print(f"{name:14s} {found['outcome']:8s} {why}", flush=True)
            if file is not None:
                file.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(any(each["outcome"] == "failed" for each in result["checks"].values()))


if __name__ == "__main__":
    main()
