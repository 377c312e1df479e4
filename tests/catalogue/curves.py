"""Runs on which an original rule and its port run, and the decisions of a policy on them."""

from typing import Any, NamedTuple

import numpy as np

from healcore.core.decision import Action, Cause
from healcore.policy import load
from tests.core.engine_runner import Runner

STEPS = 500


class Decisions(NamedTuple):
    """What a policy decides at each step of a run, (steps,)."""

    cause: np.ndarray
    action: np.ndarray
    skip: np.ndarray
    lr_scale: np.ndarray
    grad_scale: np.ndarray
    threshold: np.ndarray
    """The limit of the clipping rule."""

    def reports(self, cause: Cause) -> np.ndarray:
        return (self.cause & int(cause)) != 0

    def orders(self, action: Action) -> np.ndarray:
        return (self.action & int(action)) != 0


def first(flags: Any) -> int | None:
    """The index of the first flag that is set; None without one."""
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None


def decisions_of(policy: Any, losses: Any, norms: Any = None, evals: Any = None) -> Decisions:
    """Drives a policy. As in a replay an ordered rollback is paid for, and nothing is restored."""
    runner = Runner(load(policy).config())
    rows = []
    columns = [[None] * len(losses) if c is None else c for c in (losses, norms, evals)]
    for loss, norm, evaluation in zip(*columns, strict=True):
        runner.step(loss=loss, grad_norm=norm, eval_loss=evaluation)
        if runner.engine.mode != "observe":  # in which a step does it by itself
            ordered = runner.state.last.decision.rollback_depth > 0
            budget = runner.state.budget
            budget = budget._replace(recoveries=np.int32(budget.recoveries - ordered))
            runner.state = runner.state._replace(budget=budget)
        last = runner.state.last  # as ordered, in observe mode too
        parts = (getattr(last.decision, name) for name in Decisions._fields[:-1])
        rows.append((*parts, last.threshold))
    return Decisions(*(np.array(column) for column in zip(*rows, strict=True)))


class CurveRun(NamedTuple):
    """Losses and norms of one run, float32 (steps,)."""

    name: str
    loss: np.ndarray
    norm: np.ndarray


def on(runs: list[CurveRun], policy: Any) -> list[tuple[CurveRun, Decisions]]:
    """Each run, and the decisions of a policy on it."""
    return [(run, decisions_of(policy, run.loss, run.norm)) for run in runs]


def healthy(seed: int = 0, steps: int = STEPS) -> CurveRun:
    """A falling, noisy, positive loss, and norms with a lognormal scatter of ten percent."""
    rng = np.random.default_rng(seed)
    loss = 2 + 3 * np.exp(-np.arange(steps) / 100) + 0.04 * rng.normal(size=steps)
    norm = (0.6 + np.exp(-np.arange(steps) / 90)) * np.exp(0.1 * rng.normal(size=steps))
    return CurveRun(f"healthy {seed}", loss.astype(np.float32), norm.astype(np.float32))


def synthetic() -> list[CurveRun]:
    """Healthy runs, single spikes, rows of them, level shifts, heavy tails; all finite, above 0."""
    runs = []
    ones = np.ones(STEPS)
    for seed in range(2):
        rng = np.random.default_rng(90 + seed)
        base = healthy(seed)
        single = (rng.random(STEPS) < 0.01) & (np.arange(STEPS) > 30)  # after a warm-up
        row = np.zeros(STEPS, bool)
        for start in (150, 270, 420):
            row[start : start + int(rng.integers(2, 12))] = True
        rise = np.clip((np.arange(STEPS) - 300) / (1, 20)[seed], 0, 1)
        heavy = 1 + 0.1 * np.abs(rng.standard_t(1.5, size=STEPS))
        tails = 1 + 0.05 * np.abs(rng.standard_t(2, size=STEPS))
        height = rng.uniform(1.3, 30, STEPS)
        runs.append(base)
        for name, loss, norm in (
            ("healthy but for norms", ones, np.where(single, 1000.0, 1.0)),
            ("spikes", np.where(single, height, 1.0), np.where(np.roll(single, 1), height, 1.0)),
            ("rows", np.where(row, 3.0, 1.0), np.where(row, height, 1.0)),
            ("shift", 1 + 3 * rise, 1 + 3 * rise),
            ("ramp", 1 + np.maximum(0, np.arange(STEPS) - 200) / 30, ones),
            ("heavy tails", heavy, heavy[::-1]),
            ("moderate tails", tails, tails[::-1]),
            ("moderate shift", 1 + rise, 1 + 2 * rise),
        ):
            scaled = (base.loss * loss).astype(np.float32), (base.norm * norm).astype(np.float32)
            runs.append(CurveRun(f"{name} {seed}", *scaled))
    return runs


SYNTHETIC = {run.name: run.loss for run in synthetic()}
"""The losses of the synthetic runs, by name."""
