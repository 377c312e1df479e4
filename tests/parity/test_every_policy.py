"""Every policy there is, recorded: the bits of the engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import healcore.policies
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.tree import leaves, map_leaves
from healcore.policy import load
from tests.parity import backends

POLICIES = sorted(path.stem for path in Path(healcore.policies.__path__[0]).glob("*.toml"))
STEPS, GROUPS = 60, 3


def signals(engine: Any, random: np.random.Generator, externally_skipped: bool) -> Signals:
    def number(*choices: float) -> np.float32:
        return np.float32(random.choice(choices) * random.random())

    return Signals(
        loss=number(1, 1, 9, np.nan),
        grad_norm=number(1, 1, 50, np.inf),
        group_norms=random.random(GROUPS).astype(np.float32) if engine.per_tensor else None,
        eval_loss=number(1, np.nan) if "eval_loss" in engine.needs else None,
        update_norm=number(1, 50) if "update_norm" in engine.needs else None,
        externally_skipped=np.bool_(random.random() < 0.3) if externally_skipped else None,
        learning_rate=number(1) if engine.limits_lr else None,
    )


@pytest.mark.parametrize("externally_skipped", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_the_recorded_step_is_the_step(name: str, externally_skipped: bool):
    engine, random = load(name).engine(), np.random.default_rng(1)
    state = mine = backends.start("recorded", engine.init(groups=GROUPS))
    program = record(engine.step, state, signals(engine, random, externally_skipped))
    for i in range(STEPS):
        seen = signals(engine, random, externally_skipped)
        with np.errstate(all="ignore"):
            new = engine.step(state, seen, xp=np)
            state, decision = map_leaves(lambda leaf: leaf[()], new)
            mine, ours = program(mine, seen)
        for a, b in zip(leaves((state, decision)), leaves((mine, ours)), strict=True):
            assert type(a) is type(b), i
            assert a.dtype == b.dtype, i
            assert a.tobytes() == b.tobytes(), i
