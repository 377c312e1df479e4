"""Policies on traces that lack the signals that they read."""

from __future__ import annotations

import pytest

from healcore.policy import loads
from healcore.tools.replay import ReplayError, replay
from tests.tools.replay import logs

LOSS_ONLY = """
schema = 1
name = "loss-only"
[clip]
kind = "none"
[detect.loss_spike]
[[respond]]
to = ["loss_spike"]
do = ["skip"]
"""


def without(tmp_path, *names):
    run = logs.noisy(60)
    run["other"] = run["loss"]
    for name in names:
        del run[name]
    return logs.trace(logs.write(tmp_path / "a.csv", run))


def test_what_is_inactive_is_reported(tmp_path):
    found = replay(without(tmp_path, "grad_norm"), "pretraining").finish().inactive
    assert found == {"grad_norm": ("clip", "grad_spike", "instability", "vanishing")}
    assert replay(without(tmp_path), "pretraining").finish().inactive == {}
    assert replay(without(tmp_path, "grad_norm"), "default").finish().inactive == {}


def test_nothing_left_to_judge(tmp_path):
    trace = without(tmp_path, "loss")
    with pytest.raises(ReplayError) as caught:
        replay(trace, loads(LOSS_ONLY))
    for part in ("loss-only", "reads loss", "only grad_norm", trace.name):
        assert part in str(caught.value)


def test_rows_with_evaluations_only_are_not_judged(tmp_path):
    run = logs.noisy(60)
    run["eval_loss"] = [""] * 59 + [3.0]
    run["loss"][59] = run["grad_norm"][59] = ""
    summary = replay(logs.trace(logs.write(tmp_path / "a.csv", run)), "default").finish()
    assert (summary.rows, summary.unjudged) == (60, 1)


def test_a_backend_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="numpy, jax, torch, got 'cupy'"):
        replay(without(tmp_path), "default", backend="cupy")
