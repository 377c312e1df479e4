"""Loss curves as CSV files, and the probe's results on them."""

from pathlib import Path
from typing import Any

import numpy as np

from healcore.tools.probe.checks import LossInputs, Report
from healcore.tools.probe.loss import probe_loss
from tests.tools.replay import logs


def write(folder: Path, values: np.ndarray, name: str = "run.csv", steps: Any = None) -> Path:
    """A CSV file with the values as they are, NaN and Inf included."""
    return logs.write(folder / name, {"loss": np.asarray(values).tolist()}, steps)


def probe(path: Path, **inputs: object) -> Report:
    return probe_loss(logs.trace(path), LossInputs.model_validate(inputs))


def probe_values(folder: Path, values: object, **inputs: object) -> Report:
    return probe(write(folder, np.asarray(values, np.float64)), **inputs)


def falling(steps: int, noise: float, seed: int = 0) -> np.ndarray:
    """A healthy run: a power law with noise."""
    random = np.random.default_rng(seed)
    return 1 + 9 * (1 + np.arange(steps) / 5) ** -0.4 + noise * random.normal(size=steps)
