"""A run that moves from framework to framework through JSON decides as one that never moved."""

from __future__ import annotations

import json

import numpy as np
import pytest

from healcore.core.engine import Engine
from healcore.core.tree import leaves, map_leaves
from tests.core import fuzz, policies
from tests.parity import backends, lockstep

LEGS = ("jax", "torch", "numpy", "recorded", "jax", "recorded", "torch")
STEPS, CHUNK = 210, 30


@pytest.mark.parametrize("clip", ["zclip", "adagc"])
def test_from_jax_to_torch_to_numpy_and_on(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    engine = Engine(policies.covering(clip))
    runs = {name: backends.runner(name, engine) for name in LEGS}
    whole = fuzz.signals(np.random.default_rng(60), STEPS, 3, groups=groups)
    for lane in range(3):
        trace = lockstep.scalar(whole, lane)
        fresh = engine.init(groups=groups)
        there, state = backends.start("recorded", fresh), fresh
        stayed, parts = [], []
        for leg, name in enumerate(LEGS):
            piece = fuzz.part(trace, leg * CHUNK, (leg + 1) * CHUNK)
            after, *outputs = runs[name](backends.start(name, state), piece)
            parts.append(tuple(outputs))
            there, *outputs = runs["recorded"](there, piece)
            stayed.append(tuple(outputs))
            # Every backend's state has the same neutral form.
            text = json.dumps(engine.to_dict(after), sort_keys=True)
            assert text == json.dumps(engine.to_dict(there), sort_keys=True), name
            state = engine.from_dict(json.loads(text))
            assert all(isinstance(leaf, np.ndarray) for leaf in leaves(state))
        assert lockstep.first_difference(whole_run(stayed), whole_run(parts)) is None


def whole_run(parts):
    return map_leaves(lambda *pieces: np.concatenate(pieces), parts[0], *parts[1:])


def test_cut_anywhere():
    """Every step of the way through JSON, on the host."""
    engine = Engine(policies.full("autoclip"))
    trace = lockstep.scalar(fuzz.signals(np.random.default_rng(61), 80, 1), 0)
    run = backends.runner("recorded", engine)
    stayed = moved = backends.start("recorded", engine.init())
    for i in range(80):
        step = fuzz.part(trace, i, i + 1)
        stayed, *a = run(stayed, step)
        data = json.loads(json.dumps(engine.to_dict(moved), allow_nan=False))
        moved, *b = run(backends.start("recorded", engine.from_dict(data)), step)
        assert lockstep.first_difference(tuple(a), tuple(b)) is None
