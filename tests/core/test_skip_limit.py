"""Finite outliers are skipped a limited number of times in a row, non-finite steps always."""

from __future__ import annotations

import numpy as np

from healcore.core.engine import RuleConfig
from healcore.core.verdict import Cause
from tests.core.engine_runner import Runner, watching

SPIKES = RuleConfig(int(Cause.GRAD_SPIKE | Cause.NONFINITE_GRAD), skip=True)
CONFIG = watching("grad_spike", SPIKES)._replace(max_skips=4)


def skips(norms) -> list[int]:
    return [i for i, d in enumerate(Runner(CONFIG).feed(grad_norm=norms)) if d.skip]


def test_a_row_of_outliers_ends_after_max_skips():
    assert skips([1.0] * 50 + [100.0] * 10) == [50, 51, 52, 53]


def test_a_healthy_step_begins_a_new_row():
    norms = [1.0] * 50 + [100.0] * 6 + [1.0] + [100.0] * 2
    assert skips(norms) == [50, 51, 52, 53, 57, 58]


def test_nonfinite_steps_are_skipped_without_limit_and_not_counted():
    assert skips([1.0] * 50 + [np.nan] * 30) == list(range(50, 80))
    norms = [1.0] * 50 + [100.0] * 2 + [np.inf] * 5 + [100.0] * 4
    assert skips(norms) == list(range(50, 59))


def test_a_skipped_step_is_not_clipped_too_and_teaches_the_clip_nothing():
    from healcore.core.clipping import RULES

    config = CONFIG._replace(clip=("zclip", RULES["zclip"]()))
    runner = Runner(config)
    runner.feed(grad_norm=[0.5] * 50)
    before = runner.state.clip
    decision = runner.step(grad_norm=100.0)
    assert decision.skip
    assert decision.grad_scale == 1
    assert runner.state.tally.clips == 0
    for a, b in zip(before[:3], runner.state.clip[:3], strict=True):
        assert a == b
