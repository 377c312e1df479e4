"""Runs on which an original rule and its port run, and the port's decisions on them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from healcore.policy import PolicySource
from tests.catalogue.watch.curves import Decisions, decisions_of
from tests.parity import recorded_runs

STEPS = 500


class Trace(NamedTuple):
    """Losses and norms of one run, float32 (steps,)."""

    name: str
    loss: np.ndarray
    norm: np.ndarray


def port(policy: PolicySource, runs: list[Trace]) -> list[Decisions]:
    """The decisions of a policy on each run."""
    return [decisions_of(policy, run.loss, run.norm) for run in runs]


def after_none(flags: np.ndarray, steps: int) -> np.ndarray:
    """Where none of the `steps` steps before had its flag set."""
    before = np.cumsum(np.concatenate([[0], flags]))
    at = np.arange(len(flags))
    return before[at] == before[np.maximum(0, at - steps)]


def healthy(seed: int, steps: int = STEPS) -> Trace:
    """A falling loss with Gaussian noise, norms with a lognormal scatter of ten percent."""
    rng = np.random.default_rng(seed)
    loss = 2 + 3 * np.exp(-np.arange(steps) / 120) + 0.05 * rng.normal(size=steps)
    norm = (0.6 + np.exp(-np.arange(steps) / 90)) * np.exp(0.1 * rng.normal(size=steps))
    return Trace(f"healthy {seed}", loss.astype(np.float32), norm.astype(np.float32))


def synthetic() -> list[Trace]:
    """Healthy runs, single spikes, rows of them, ramps, level shifts, heavy tails; all finite."""
    runs = []
    for seed in range(2):
        rng = np.random.default_rng(50 + seed)
        base = healthy(seed)
        single = rng.random(STEPS) < 0.01
        row = np.zeros(STEPS, bool)
        for start in (150, 270, 420):
            row[start : start + int(rng.integers(2, 12))] = True
        rise = np.clip((np.arange(STEPS) - 300) / (1, 20)[seed], 0, 1)
        heavy = 1 + 0.05 * np.abs(rng.standard_t(2, size=STEPS))
        height = rng.uniform(1.3, 30, STEPS)
        ones = np.ones(STEPS)
        runs.append(base)
        for name, loss, norm in (
            ("spikes", np.where(single, height, 1.0), np.where(np.roll(single, 1), height, 1.0)),
            ("rows", np.where(row, 3.0, 1.0), np.where(row, height, 1.0)),
            ("shift", 1 + rise, 1 + 3 * rise),
            ("heavy tails", heavy, heavy[::-1]),
            ("norm only", ones, np.where(single, 1000.0, 1.0)),
        ):
            scaled = (base.loss * loss).astype(np.float32), (base.norm * norm).astype(np.float32)
            runs.append(Trace(f"{name} {seed}", *scaled))
    return runs


def from_the_records(rows: int = 500, most: int = 10) -> list[Trace]:
    """Recorded runs with finite losses and norms, where they are; else none."""
    if recorded_runs.needed.args[0]:
        return []
    runs = []
    for name, loss, norm, onset in recorded_runs.all_runs():
        if norm is None or not (np.isfinite(loss).all() and np.isfinite(norm).all()):
            continue
        start = max(0, min(onset - rows // 2, len(loss) - rows))
        runs.append(Trace(name, loss[start : start + rows], norm[start : start + rows]))
    spiky = [run for run in runs if "calm" not in run.name]
    rest = [run for run in runs if "calm" in run.name]
    return [*spiky[:: max(1, len(spiky) // most)][: most - 4], *rest[:: max(1, len(rest) // 4)][:4]]


@functools.cache
def everything() -> list[Trace]:
    """Synthetic and recorded runs."""
    return [*synthetic(), *from_the_records()]
