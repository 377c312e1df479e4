"""GradScaler: scaled gradients, its own skips, its attributes."""

import contextlib
import json
import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from healcore.core.decision import Cause
from healcore.core.detectors import OverfitConfig
from healcore.core.engine import Engine, EngineConfig
from healcore.runtime.healer import Healer
from healcore.runtime.run.ending.exits import RunStopped
from healcore.torch import attach
from healcore.torch.measurement import MAX_OVERFLOWS
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, snapshot

SCALE = 1024.0
every_way = pytest.mark.parametrize(
    ("fused", "where", "unscale"),
    [(fused, at, fused == (at == "host")) for fused in (True, False) for at in ("host", "device")],
)


class Loop:
    """A loop with a GradScaler around one optimizer."""

    def __init__(self, kind: type[Optimizer] = AdamW, **options: Any) -> None:
        self.p: Any = Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.optimizer = kind([self.p], **{"lr": 0.1, **options})  # type: ignore[call-arg]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def step(self, *, factor=1.0, overflow=0.0, unscale: bool, heal: Any = None, clip=0.0) -> None:
        self.optimizer.zero_grad()
        loss = 0.5 * (self.p**2).sum() * factor
        if heal is not None:
            heal.observe(loss)
        self.scaler.scale(loss).backward()
        self.p.grad += overflow
        if unscale:
            self.scaler.unscale_(self.optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_([self.p], clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@every_way
def test_clip_is_that_of_clip_grad_norm_after_unscale(fused: bool, where: Any, unscale: bool):
    mine, twin = Loop(SGD, fused=fused), Loop(SGD, fused=fused)
    heal = attach(mine.optimizer, policies.fixed(0.5), engine=where)
    for _ in range(3):
        mine.step(unscale=unscale, heal=heal)
        twin.step(unscale=True, clip=0.5)
    torch.testing.assert_close(mine.p, twin.p, rtol=1e-6, atol=0)
    assert float(mine.p.detach().norm()) < math.sqrt(14)


@every_way
def test_an_overflow_skipped_by_the_scaler_is_not_counted(fused: bool, where: Any, unscale: bool):
    """A spike is skipped by the policy, and no other step is changed."""
    mine, twin = Loop(fused=fused), Loop(fused=fused)
    heal = attach(mine.optimizer, policies.SKIPS, engine=where, scaler=mine.scaler)
    for _ in range(6):
        mine.step(unscale=unscale, heal=heal)
        twin.step(unscale=unscale)
    expected = snapshot(twin.optimizer)
    assert_same(snapshot(mine.optimizer), expected)
    assert mine.scaler.state_dict() == twin.scaler.state_dict()
    assert not {"grad_scale", "found_inf"} & set(vars(mine.optimizer))
    mine.step(factor=1e4, unscale=unscale, heal=heal)
    assert_same(snapshot(mine.optimizer), expected)
    assert mine.scaler.get_scale() == SCALE
    state = heal.state_dict()
    mine.step(overflow=math.inf, unscale=unscale, heal=heal)
    assert_same(snapshot(mine.optimizer), expected)
    assert heal.state_dict() == state  # nothing learnt, nothing counted
    assert mine.scaler.get_scale() == SCALE / 2
    mine.step(unscale=unscale, heal=heal)
    metrics = heal.metrics()
    assert (int(metrics["heal/steps"]), int(metrics["heal/skips"])) == (8, 1)
    assert math.isfinite(float(metrics["heal/loss"]))
    assert snapshot(mine.optimizer)["params"] != expected["params"]


@every_way
def test_a_loss_that_is_not_finite_is_no_overflow(fused: bool, where: Any, unscale: bool):
    """It is reported, and the next step is not judged by it."""
    loop, twin = Loop(fused=fused), Loop(fused=fused)
    heal = attach(loop.optimizer, policies.SKIPS, engine=where, scaler=loop.scaler)
    for i in range(12):
        factor = math.nan if i in (6, 8) else 1.0
        loop.step(factor=factor, unscale=unscale, heal=heal)
        twin.step(factor=factor, unscale=unscale)
        heal.judge_dropped()
        assert int(heal.metrics()["heal/alarms"]) == (i >= 6) + (i >= 8)
    assert_same(snapshot(loop.optimizer), snapshot(twin.optimizer))
    assert math.isfinite(float(heal.metrics()["heal/loss"]))


@every_way
def test_overflows_that_do_not_end_are_counted(fused: bool, where: Any, unscale: bool):
    loop = Loop(fused=fused)
    heal = attach(loop.optimizer, policies.CUTS, engine=where, scaler=loop.scaler)
    for _ in range(3):
        loop.step(unscale=unscale, heal=heal)
    before = snapshot(loop.optimizer)
    for _ in range(MAX_OVERFLOWS):
        loop.step(overflow=math.nan, unscale=unscale, heal=heal)
    heal.judge_dropped()
    assert int(heal.metrics()["heal/alarms"]) == 0
    for _ in range(5):
        loop.step(overflow=math.nan, unscale=unscale, heal=heal)
    heal.judge_dropped()
    metrics = heal.metrics()
    assert int(metrics["heal/alarms"]) == int(metrics["heal/skips"]) == 5
    assert int(metrics["heal/lr_cuts"]) > 0
    assert_same(before, snapshot(loop.optimizer))
    # One step that is taken, and the next overflow is the scaler's business again.
    loop.scaler.update(SCALE)
    loop.step(unscale=unscale, heal=heal)
    assert snapshot(loop.optimizer)["params"] != before["params"]
    loop.step(overflow=math.inf, unscale=unscale, heal=heal)
    heal.judge_dropped()
    assert int(heal.metrics()["heal/alarms"]) == 5


@every_way
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_time_signals_of_an_overflow_are_kept(
    fused: bool, where: Any, unscale: bool, when: str
):
    """An announced change and an evaluation, reported before or right after a dropped step."""
    for one in ("change", "evaluation"):
        loop = Loop(fused=fused)
        overfit = ("overfit", OverfitConfig(max_gap=20.0, patience=1))
        config = policies.SKIPS.config
        engine = Engine(config._replace(detectors=(*config.detectors, overfit)))
        heal = attach(loop.optimizer, engine, engine=where, scaler=loop.scaler)
        for _ in range(6):
            loop.step(unscale=unscale, heal=heal)
        report = heal.expect_change if one == "change" else partial(heal.observe_eval, 99.0)
        for what in (report, partial(loop.step, overflow=math.inf, unscale=unscale, heal=heal))[
            :: 1 if when == "before" else -1
        ]:
            what()
        loop.step(factor=1e3 if one == "change" else 1.0, unscale=unscale, heal=heal)
        decision = heal.last_decision()
        assert decision is not None
        assert decision.cause == (Cause(0) if one == "change" else Cause.OVERFIT)


def test_an_evaluation_before_a_step_without_gradients_counts_at_the_next_step():
    loop = Loop()
    engine = Engine(EngineConfig(detectors=(("overfit", OverfitConfig(patience=1)),)))
    heal = attach(loop.optimizer, engine)
    loop.step(unscale=True, heal=heal)
    heal.observe_eval(99.0)
    loop.optimizer.zero_grad()
    loop.optimizer.step()
    loop.step(unscale=True, heal=heal)
    assert int(heal.metrics()["heal/alarms"]) == 1


@pytest.mark.slow
def test_a_healer_stops_a_run_whose_every_step_overflows():
    loop = Loop(fused=False)
    state = {"p": [loop.p], "optimizer": loop.optimizer, "scaler": loop.scaler}
    healer = Healer("default", state=state)
    with pytest.raises(RunStopped), healer:  # noqa: PT012 -- the loop is stopped
        for i in healer.batches(list(range(3000))):
            loop.step(factor=math.nan if i >= 20 else 1.0, unscale=False, heal=healer)
    assert healer.step >= 20 + 1000, "a thousand steps in a row train nothing"
    assert healer.rollbacks == 6, "restored in vain, four times with a lower rate"
    assert loop.p.isfinite().all()


@pytest.mark.parametrize("attached", [True, False])
def test_a_scaler_that_is_not_enabled_counts_as_none(attached: bool):
    """`GradScaler(enabled=dtype == "float16")` stands in loops that also train in bfloat16."""
    loop = Loop()
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = {"p": [loop.p], "optimizer": loop.optimizer, "scaler": loop.scaler}
    with contextlib.ExitStack() as stack:
        steps: Any = range(3)
        if attached:
            attach(loop.optimizer, scaler=loop.scaler)
        else:
            steps = stack.enter_context(Healer(state=state)).steps(3)
        for i in steps:
            before = loop.p.detach().clone()
            loop.step(factor=math.nan if i == 1 else 1.0, unscale=True)
            assert torch.equal(loop.p, before) is (i == 1)


def test_a_step_that_the_scaler_skips_leaves_a_count(tmp_path, caplog):
    """A NaN that only the gradients have looks like an overflow: no line, but a count."""
    caplog.set_level(logging.INFO, logger="healcore")
    loop = Loop()
    state = {"p": loop.p, "optimizer": loop.optimizer, "scaler": loop.scaler}
    with Healer("default", state=state, store=tmp_path) as healer:
        for number in healer.batches(range(12)):
            overflow = math.nan if number in (4, 9) else 0.0
            loop.step(unscale=True, heal=healer, overflow=overflow)
    rows = [json.loads(line) for line in (tmp_path / "healcore.metrics.jsonl").open()]
    assert [row["step"] for row in rows if row.get("scaler_skip")] == [4, 9]
    assert [row["step"] for row in rows if "grad_norm" not in row] == [4, 9]
    assert "no intervention" in caplog.text
    assert healer.metrics()["heal/scaler_skips"] == 2
    assert "nonfinite" not in caplog.text
