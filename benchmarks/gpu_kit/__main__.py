"""Runs healcore on one GPU: decisions, waits, precision, rollbacks, trainers, cost.

Each check runs in a process of its own and within a time of its own. All checks together end within
--seconds: a check for which no time is left is reported as not run. The results are written after
each check. Without CUDA the checks run on the CPU, smaller, those that need CUDA say so, and
nothing is written without --json.

    python -m benchmarks.gpu_kit [--seconds N] [--json FILE] [CHECK ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple


class Check(NamedTuple):
    """Where a check is, and how long it may take."""

    module: str
    limit_s: float


CHECKS = {
    "decisions": Check("attached", 150),
    "grad_scaler": Check("attached", 60),
    "bfloat16": Check("attached", 40),
    "launches": Check("attached", 90),
    "out_of_memory": Check("healed", 60),
    "rollback": Check("healed", 90),
    "snapshots": Check("healed", 90),
    "fsdp2": Check("trainers", 60),
    "huggingface": Check("trainers", 90),
    "protect": Check("in_jax", 90),
    "heal_zclip": Check("in_jax", 60),
    "jax_rollback": Check("in_jax", 120),
}
"""The checks, in the order in which they run."""

COST = {"cost_25M": 25_000_000, "cost_124M": 124_000_000, "cost_1B": 1_000_000_000}
"""Parameters of `benchmarks/step_overhead.py`. They run last, the largest at the end."""
COST_LIMIT_S = 120
TOTAL_S = 510
"""The time of all checks together: below nine minutes."""
LEAST_S = 10
"""With less time left no check begins."""

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
RESULT = "result: "
OPTIONAL = ("accelerate", "jax", "optax", "transformers")
"""Packages without which some checks are skipped."""


def missing_packages() -> list[str]:
    """Packages that healcore needs, and that are not installed. A GPU machine may have few."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]]
    return [n for n in [*names, "torch"] if importlib.util.find_spec(n.replace("-", "_")) is None]


def run_one(name: str) -> None:
    """Runs a check in this process, and prints its result as the last line."""
    from healcore.adapter_registry import MissingExtraError

    try:
        module = importlib.import_module(f"benchmarks.gpu_kit.{CHECKS[name].module}")
        found = {"outcome": "passed", **getattr(module, name)()}
    except MissingExtraError as error:
        found = {"outcome": "skipped", "why": str(error)}
    except Exception as error:
        package = error.name if isinstance(error, ModuleNotFoundError) else None
        if package in OPTIONAL:
            found = {"outcome": "skipped", "why": f"{package} is not installed"}
        else:
            traceback.print_exc()
            found = {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}
    print(RESULT + json.dumps(found), flush=True)


def command(name: str, folder: Path) -> list[str]:
    """The program of a check."""
    if name not in COST:
        return [sys.executable, "-m", "benchmarks.gpu_kit", "--here", name]
    from benchmarks.gpu_kit.device import CUDA

    size = ["--params", str(COST[name]), "--device", "cuda"] if CUDA else ["--quick"]
    options = ["--framework", "torch", "--rounds", "21" if CUDA else "3"]
    file = ROOT / "benchmarks" / "step_overhead.py"
    return [sys.executable, str(file), *size, *options, "--json", str(folder / f"{name}.json")]


def environment() -> dict[str, str]:
    """The environment of a check: one GPU, the checkout's healcore, no memory kept by JAX."""
    from benchmarks.gpu_kit.device import CUDA

    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "GPU_KIT_CUDA": str(int(CUDA)),
    }
    if CUDA:
        made["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return made


def executed(program: list[str], limit_s: float) -> tuple[int | None, str, str]:
    """Status, or None after `limit_s` seconds, and the output of a program.

    Afterwards all processes that the program has started in its session are killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, because a compiler's worker that outlives the program would keep a pipe open.
        process = subprocess.Popen(
            program, stdout=out, stderr=err, cwd=ROOT, env=environment(), start_new_session=True
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for each in (out, err):
            each.seek(0)
        return status, out.read(), err.read()


def run(name: str, folder: Path, left_s: float) -> dict[str, Any]:
    """The result of a check that runs in a process of its own, with `left_s` seconds for all."""
    if left_s < LEAST_S:
        return {"outcome": "not run", "why": "no time left"}
    if name in COST and (why := too_large(COST[name])):
        return {"outcome": "skipped", "why": why}
    own = CHECKS[name].limit_s if name in CHECKS else COST_LIMIT_S
    limit_s = min(own, left_s)
    began = time.monotonic()
    status, out, err = executed(command(name, folder), limit_s)
    seconds = round(time.monotonic() - began, 1)
    measured = folder / f"{name}.json"
    lines = [line for line in out.splitlines() if line.startswith(RESULT)]
    if status is None and left_s < own:
        why = f"no time left: stopped after {limit_s:.0f} s"
        return {"outcome": "not run", "why": why, "seconds": seconds}
    if status is None:
        found = {"outcome": "failed", "error": f"not done after {limit_s:.0f} s"}
    elif status == 0 and measured.exists():
        found = {"outcome": "passed", **json.loads(measured.read_text())}
    elif status == 0 and lines:
        found = json.loads(lines[-1].removeprefix(RESULT))
    else:
        found = {"outcome": "failed", "error": f"ended with {status}"}
    if found["outcome"] == "failed":
        found["log"] = err[-4000:]
    return {**found, "seconds": seconds}


def too_large(params: int) -> str:
    """Why the device cannot hold the contenders of `step_overhead.py`, or an empty string."""
    import torch

    from benchmarks.gpu_kit.device import CUDA

    if not CUDA:
        return ""
    contenders = 5 + (importlib.util.find_spec("zclip") is not None)
    # Weights, gradients and two moments each, and the gradients that they are copied from.
    needed = 4 * params * (4 * contenders + 1) * 1.05 + 2e9
    there = torch.cuda.get_device_properties(0).total_memory
    return f"needs {needed / 1e9:.0f} GB of device memory" if needed > there else ""


def described() -> dict[str, Any]:
    """What the results are of: the device, and the version of the code."""
    import healcore
    from benchmarks.gpu_kit.device import name_of_device

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        return {
            "device": name_of_device(),
            "healcore": healcore.__version__,
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
        }
    return {"device": name_of_device(), "healcore": healcore.__version__}


def main() -> None:
    """Runs the checks, writes the results, and exits with 1 if one has failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join([*CHECKS, *COST]))
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="of all checks together (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"default: {RESULTS.relative_to(ROOT)}"
    )
    parser.add_argument("--here", metavar="CHECK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := missing_packages():
        parser.error(f"healcore needs more packages: pip install {' '.join(missing)}")
    if options.here:
        run_one(options.here)
        return
    if unknown := {*options.checks} - {*CHECKS, *COST}:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    from benchmarks.gpu_kit.device import CUDA

    # A few checks alone would replace the results of all.
    file = options.json or (RESULTS if CUDA and not options.checks else None)
    everything = [*CHECKS, *COST] if CUDA else [*CHECKS, next(iter(COST))]
    result: dict[str, Any] = {**described(), "checks": {}}
    print(result["device"])
    with tempfile.TemporaryDirectory() as folder:
        for name in options.checks or everything:
            left_s = options.seconds - (time.monotonic() - began)
            found = run(name, Path(folder), left_s)
            result["checks"][name] = found
            why = found.get("error") or found.get("why") or ""
            print(f"{name:14s} {found['outcome']:8s} {found.get('seconds', '')!s:>6} {why}")
            sys.stdout.flush()
            if file is not None:
                file.write_text(json.dumps(result, indent=2) + "\n")
    counts = Counter(each["outcome"] for each in result["checks"].values())
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
