"""A run of its own (0-d arrays) on every backend, the host's included, equals its lane.

On JAX it does in test_moving.
"""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.engine import Engine
from healcore.core.tree import map_leaves
from tests.core import fuzz, policies
from tests.parity import backends, lockstep

STEPS = 150


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_numpy_host_and_torch_with_scalars(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(40), STEPS, 4, groups=groups)
    traces = [lockstep.scalar(trace, lane) for lane in range(4)]
    config = policies.covering(clip)
    lockstep.steps_equal(config, traces, ("recorded",), groups=groups)
    lockstep.steps_equal(config, traces[:1], ("torch",), groups=groups)


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_a_lane_is_a_run_of_its_own(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(42), STEPS, 12, groups=groups)
    engine = Engine(policies.covering(clip))
    run = backends.runner("numpy", engine)
    _, *together = run(engine.init(groups=groups, batch=(12,)), trace)
    alone = backends.runner("recorded", engine)
    for lane in range(0, 12, 3):
        fresh = backends.start("recorded", engine.init(groups=groups))
        _, *single = alone(fresh, lockstep.scalar(trace, lane))
        mine = map_leaves(lambda leaf, lane=lane: leaf[:, lane], tuple(together))
        assert lockstep.first_difference(mine, tuple(single)) is None
