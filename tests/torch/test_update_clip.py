"""`[update_clip]` in torch: the update is shortened after the step, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from healcore.core.clipping import UpdateClipConfig
from healcore.core.engine import Engine
from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import NAN, Where, host_and_device


def run(
    sizes: list[float],
    where: Where,
    policy: Any = policies.CLIPS_UPDATES,
    dtype: Any = torch.float32,
    **options: Any,
) -> tuple[list[float], Any, Any, Parameter]:
    """The moved lengths of SGD on gradients of these norms; the handle, optimizer and parameter."""
    p = Parameter(torch.zeros(4, dtype=dtype))
    optimizer = SGD([p], lr=1.0, momentum=0.0, fused=True)
    heal = None if policy is None else attach(optimizer, policy, engine=where)
    moved = []
    for size in sizes:
        before = p.detach().clone()
        p.grad = torch.full((4,), size / 2, dtype=dtype)
        optimizer.step()
        moved.append(float((p.detach() - before).float().norm()))
    return moved, heal, optimizer, p


@host_and_device
def test_an_update_that_stands_out_is_shortened_to_what_its_history_allows(where: Where):
    moved, heal, *_ = run([1.0, 1.1, 0.9, 1.0, 1.05, 64.0, 1.0], where)
    assert moved[:5] == pytest.approx([1.0, 1.1, 0.9, 1.0, 1.05], rel=1e-5)
    assert 1.0 < moved[5] < 1.5
    assert moved[6] == pytest.approx(1.0, rel=1e-5)
    metrics = heal.metrics()
    assert int(metrics["heal/update_clips"]) == 1
    assert float(metrics["heal/update_norm"]) == pytest.approx(1.0)


@host_and_device
def test_moments_and_counters_are_those_that_the_optimizer_made(where: Where):
    ours, theirs = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    healed, plain = AdamW([ours], lr=0.1, fused=True), AdamW([theirs], lr=0.1, fused=True)
    attach(healed, policies.CLIPS_UPDATES, engine=where)
    for size in [1.0, 1.1, 0.9, 1.0, 1e-6, 1.0, 50.0, 1.0]:
        for p, optimizer in ((ours, healed), (theirs, plain)):
            p.grad = torch.full((3,), size)
            optimizer.step()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(healed.state[ours][name], plain.state[theirs][name])


@host_and_device
def test_an_ordinary_update_keeps_every_bit(where: Where):
    p = Parameter(torch.tensor([-0.0, 0.0, 1e-40, 1.0]))
    q = Parameter(p.detach().clone())
    ours, plain = SGD([p], lr=0.1, fused=True), SGD([q], lr=0.1, fused=True)
    attach(ours, policies.CLIPS_UPDATES, engine=where)
    for _ in range(8):
        for each, optimizer in ((p, ours), (q, plain)):
            each.grad = torch.tensor([0.0, -0.0, 0.0, 0.01])
            optimizer.step()
        assert torch.equal(p.view(torch.int32), q.view(torch.int32))


@host_and_device
def test_a_skipped_step_moves_nothing_and_is_not_learnt(where: Where):
    moved, heal, *_ = run([1.0, 1.1, 0.9, 1.0, NAN, 1.0], where)
    assert moved[4] == 0
    assert heal.state_dict()["state"]["update_clip"]["rule"]["count"] == 4
    assert int(heal.metrics()["heal/update_clips"]) == 0


@host_and_device
def test_a_cut_of_the_learning_rate_changes_no_baseline(where: Where):
    cuts = policies.CUTS.config
    policy = Engine(cuts._replace(update_clip=UpdateClipConfig(warmup_steps=4), max_skips=0))
    ordinary = [1.0, 1.1, 0.9, 1.0] * 2
    moved, heal, *_ = run([*ordinary, NAN, *ordinary, 64.0], where, policy)
    assert moved[9] == pytest.approx(0.5)
    mean = heal.state_dict()["state"]["update_clip"]["rule"]["mean"]
    assert mean == pytest.approx(1.0, abs=0.05)
    assert 0.5 < moved[-1] < 0.8, "half of what the history allows"


def test_host_and_device_agree():
    sizes = [1.0, 1.1, 0.9, 1.0, 1.05, 64.0, 1.0, NAN, 3.0, 1.0]
    (_, host, _, p), (_, device, _, q) = run(sizes, "host"), run(sizes, "device")
    assert host.state_dict() == device.state_dict()
    assert torch.allclose(p, q, rtol=1e-6)


@host_and_device
def test_half_precision(where: Where):
    moved, *_ = run([1.0, 1.125, 0.875, 1.0, 1.0, 32.0], where, dtype=torch.bfloat16)
    assert 0.9 < moved[-1] < 2.0


@host_and_device
def test_observe_mode_judges_and_moves_as_the_optimizer_does(where: Where):
    sizes = [1.0, 1.1, 0.9, 1.0, 1.05, 64.0, 1.0]
    observes = Engine(policies.CLIPS_UPDATES.config._replace(mode="observe"))
    moved, heal, *_ = run(sizes, where, observes)
    assert moved == run(sizes, where, None)[0]
    assert int(heal.metrics()["heal/update_clips"]) == 1


@host_and_device
def test_a_policy_that_reads_update_norms_gets_them_without_a_call(where: Where):
    spikes = policies.EVERYTHING.config.detectors
    watched = tuple(each for each in spikes if each[0] == "update_spike")
    assert watched
    policy = Engine(
        policies.CLIPS_UPDATES.config._replace(
            detectors=(*policies.CLIPS_UPDATES.config.detectors, *watched)
        )
    )
    _, heal, *_ = run([1.0, 1.1], where, policy)
    assert heal.report().waiting_for == ("loss",), "and not for update_norm"


def test_the_copy_is_declared_and_gone_without_the_table():
    _, heal, _, p = run([1.0], "host")
    assert "one copy of the parameters, 1.6e-05 MB" in str(heal.report())
    assert p.nbytes == 16
    _, plain, *_ = run([1.0], "host", policies.SKIPS)
    assert plain.report().update_clip == ""
    assert plain.hooks.update_clip is None
