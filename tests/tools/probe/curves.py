"""Loss curves as CSV files, and the probe's results on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from healcore.tools.probe.checks import LossInputs, ProbeResult
from healcore.tools.probe.loss import probe_loss
from healcore.tools.traces import open_traces


def write(folder: Path, values: np.ndarray, name: str = "run.csv", steps: object = None) -> Path:
    """A CSV file with the values as they are, NaN and Inf included."""
    of = np.arange(len(values)) if steps is None else np.asarray(steps)
    path = folder / name
    pairs = zip(of.tolist(), map(float, values), strict=True)
    lines = [f"{step},{value!r}" for step, value in pairs]
    path.write_text("\n".join(["step,loss", *lines]) + "\n")
    return path


def probe(path: Path, **inputs: object) -> ProbeResult:
    (trace,), failed = open_traces([str(path)])
    assert not failed
    return probe_loss(trace, LossInputs.model_validate(inputs))


def probe_values(folder: Path, values: object, **inputs: object) -> ProbeResult:
    return probe(write(folder, np.asarray(values, np.float64)), **inputs)


def verdict_of(result: ProbeResult, name: str) -> str:
    return next(check.verdict.value for check in result.checks if check.name == name)


def falling(steps: int, noise: float, seed: int = 0) -> np.ndarray:
    """A healthy run: a power law with noise."""
    random = np.random.default_rng(seed)
    return 1 + 9 * (1 + np.arange(steps) / 5) ** -0.4 + noise * random.normal(size=steps)
