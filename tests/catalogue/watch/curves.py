"""Loss curves on which an original rule and its port run, and the port's decisions on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.core.verdict import Action, Cause
from healcore.policy import load
from tests.parity import recorded_runs

STEPS = 420


class Decisions(NamedTuple):
    """What a policy decides at each step of a curve, (steps,)."""

    cause: np.ndarray
    action: np.ndarray
    skip: np.ndarray
    lr_scale: np.ndarray
    grad_scale: np.ndarray
    threshold: np.ndarray
    """The limit of the clipping rule."""

    @property
    def alarm(self) -> np.ndarray:
        """At which steps some detector has a cause."""
        return self.cause != 0

    def reports(self, cause: Cause) -> np.ndarray:
        """At which steps, bool (steps,)."""
        return (self.cause & int(cause)) != 0

    def orders(self, action: Action) -> np.ndarray:
        """At which steps, bool (steps,)."""
        return (self.action & int(action)) != 0


def first(flags: Any) -> int | None:
    """The index of the first flag that is set; None without one."""
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None


def decisions_of(policy: Any, losses: Any, norms: Any = None, evals: Any = None) -> Decisions:
    """Drives a policy. As in a replay an ordered rollback is paid for, and nothing is restored."""
    engine = load(policy).engine()
    state = map_leaves(lambda leaf: leaf[()], engine.init())

    def step(state: Any, seen: Signals, *, xp: Any) -> Any:
        state, _ = engine.step(state, seen, xp=xp)
        # In observe mode a step does it by itself.
        return state if engine.mode == "observe" else engine.subtract_rollback(state, xp=xp)

    rows, program = [], None
    columns = [losses, norms, evals]
    arrays = [None if c is None else np.asarray(c, np.float32) for c in columns]
    with np.errstate(all="ignore"):
        for i in range(len(arrays[0])):  # type: ignore[arg-type]
            loss, norm, evaluation = (None if a is None else a[i] for a in arrays)
            seen = Signals(loss=loss, grad_norm=norm, eval_loss=evaluation)
            program = program or record(step, state, seen)
            state = program(state, seen)
            ordered = state.last.decision  # as ordered, in observe mode too
            parts = (getattr(ordered, name) for name in Decisions._fields[:-1])
            rows.append((*parts, state.last.threshold))
    return Decisions(*(np.array(column) for column in zip(*rows, strict=True)))


def healthy(steps: int = STEPS, *, seed: int = 0, level: float = 2.0) -> np.ndarray:
    """A falling, noisy, positive loss."""
    rng = np.random.default_rng(seed)
    fall = 3 * np.exp(-np.arange(steps) / 80)
    return (level + fall + 0.03 * rng.standard_normal(steps)).astype(np.float32)


def synthetic() -> dict[str, np.ndarray]:
    """Positive finite losses: healthy ones, single spikes, rows, ramps, shifts, heavy tails."""
    made = {}
    for seed in range(2):
        rng = np.random.default_rng(100 + seed)
        spikes = healthy(seed=seed)
        at = rng.choice(np.arange(20, STEPS), 12, replace=False)
        spikes[at] *= rng.uniform(1.5, 8, len(at)).astype(np.float32)
        rows = healthy(seed=seed)
        for start in (150, 260, 340):
            rows[start : start + int(rng.integers(2, 9))] *= np.float32(rng.uniform(1.8, 4))
        tails = np.abs(2 + rng.standard_t(1.5, STEPS)).astype(np.float32) + np.float32(0.05)
        curves = {
            "healthy": healthy(seed=seed),
            "spikes": spikes,
            "rows": rows,
            "heavy tails": tails,
        }
        made |= {f"{name} {seed}": curve for name, curve in curves.items()}
    made["ramp"], made["shift"] = healthy(seed=7), healthy(seed=8)
    made["ramp"][200:] += np.linspace(0, 20, STEPS - 200, dtype=np.float32)
    made["shift"][250:] *= 4
    return made


SOME_AND_ALL = pytest.mark.parametrize(
    "most", [2, pytest.param(1000, marks=pytest.mark.stress)], ids=["some", "all"]
)


def from_runs(rows: int, most: int) -> dict[str, np.ndarray]:
    """Finite stretches of recorded runs about their first spike: at most `most` of each folder."""
    kept: dict[str, np.ndarray] = {}
    folders: dict[str, int] = {}
    for name, losses, _, onset in recorded_runs.all_runs():
        folder = name.rsplit("__", 1)[0].rsplit("/", 1)[0]
        start = max(0, min(onset - rows // 2, len(losses) - rows))
        part = losses[start : start + rows]
        if folders.get(folder, 0) < most and np.isfinite(part).all() and (part > 0).all():
            folders[folder] = folders.get(folder, 0) + 1
            kept[name] = part
    return kept
