"""`healer.stats()` has the numbers that a test counts for itself: calls, files, seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from healcore import Checkpoints, Cost, Healer, Keep
from healcore.runtime.cost import Meter
from healcore.runtime.store.memory import SMALL
from healcore.tools.report.page import render
from healcore.tools.report.runs import read_reports
from healcore.torch import attach
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, rules

STEPS, EVERY, FAULT = 220, 50, 130
ALL = Keep(good=99, candidates=99, quarantined=99)
BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


class Counted:
    """A healed run with a `loss_fn` that counts its own calls without gradients."""

    def __init__(self, framework: str, store: Path, fault: int | None = FAULT, **more: Any) -> None:
        self.calls, self.seconds = 0, 0.0
        faults = Faults(once=[] if fault is None else [fault])
        self.loop = loop_of(framework, faults, rules())
        loss_fn = self.torch_loss if framework == "torch" else self.jax_loss
        began = time.perf_counter()
        with Healer(
            rules(),
            state=self.loop.state,
            store=store,
            loss_fn=loss_fn,
            checkpoints=Checkpoints(every=EVERY, keep=ALL),
            **more,
        ) as self.healer:
            for number in self.healer.batches(range(STEPS)):
                self.loop.step(self.healer, number)
            self.before_the_end = self.healer.stats()
        self.whole = time.perf_counter() - began
        self.cost = self.healer.stats()

    def torch_loss(self, number: int) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        began = time.perf_counter()
        self.calls += 1
        inputs, targets = map(torch.from_numpy, self.loop.faults.batch(number))
        loss = (self.loop.model(inputs) - targets).square().mean()
        self.seconds += time.perf_counter() - began
        return loss

    def jax_loss(self, state: Any, number: int) -> jax.Array:
        began = time.perf_counter()
        self.calls += 1
        inputs, targets = self.loop.faults.batch(number)
        params = state["params"]
        hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
        loss = jnp.mean((hidden @ params["w2"] + params["b2"] - targets) ** 2)
        self.seconds += time.perf_counter() - began
        return loss


@BOTH
def test_a_run_with_saves_comparisons_and_a_rollback(framework, tmp_path, capsys):
    run = Counted(framework, tmp_path)
    cost, (rollback,) = run.cost, events(tmp_path, "rollback")
    # The three calls on the first batch change no variable, also not `run.calls`.
    assert cost.forward_passes == run.calls + 3 >= 5, "the first batch and two heartbeats"
    assert cost.comparisons_s >= run.seconds
    assert 0 < cost.first_pass_s < cost.comparisons_s
    repeated = rollback["step"] - rollback["checkpoint"]
    assert cost.steps == run.healer.step + repeated == STEPS - 1 + repeated, "one batch is skipped"

    files = [f for f in tmp_path.rglob("step-*/**/*") if f.is_file() and f.name != "status.json"]
    assert cost.written_bytes == sum(f.stat().st_size for f in files) > 0
    saves = events(tmp_path, "save")
    assert len({f.relative_to(tmp_path).parts[0] for f in files}) == len(saves) >= 5
    assert cost.saves_s >= sum(event["seconds"] for event in saves)
    (begin,) = events(tmp_path, "rollback_begin")
    assert 0 < rollback["mono"] - begin["mono"] < 2 * cost.restores_s + 0.1

    store = run.healer.store
    assert store.memory is not None
    copies = [saved.bytes for saved in store.memory.steps()]
    anchors = run.healer.run.recovery.dominance.anchors
    parameters = 4 * (4 * 8 + 8 + 8 + 1)
    extra = (cost.host_bytes or 0) - len(anchors) * parameters
    assert sum(copies) <= extra <= (SMALL.most + 2) * max(copies)

    assert cost.host_syncs == 0
    assert (cost.in_steps_s is None) == (framework == "jax")
    assert 0 < cost.total_s < cost.seconds <= run.whole
    assert 0 < run.before_the_end.seconds < cost.seconds
    assert run.before_the_end.steps in (cost.steps, cost.steps - 1)

    (end,) = events(tmp_path, "end")
    assert end["cost"] == cost.known()
    assert capsys.readouterr().err.splitlines()[-1] == f"healcore: {cost}"
    report = run.healer.report()
    assert report.cost == cost
    assert report.to_dict()["cost"]["forward_passes"] == cost.forward_passes
    assert str(cost) in str(report)
    page = render(read_reports(tmp_path / "healcore.events.jsonl"))
    assert f"<dd>{str(Cost(**end['cost'])).removeprefix('healing ')}</dd>" in page


@BOTH
def test_what_a_run_has_not_done_costs_nothing(framework, tmp_path):
    run = Counted(framework, tmp_path, fault=None)
    assert run.cost.restores_s == 0
    assert run.cost.steps == STEPS
    loop = loop_of(framework, Faults(), rules())
    with Healer(rules(), state=loop.state) as healer:
        for number in healer.batches(range(10)):
            loop.step(healer, number)
    cost = healer.stats()
    assert (cost.written_bytes, cost.forward_passes, cost.comparisons_s) == (0, 0, 0)
    assert cost.host_bytes, "copies are in memory"


def test_a_restart_counts_its_restore_and_not_the_earlier_process(tmp_path):
    first = loop_of("torch", Faults())
    with Healer(rules(), state=first.state, store=tmp_path) as healer:
        for number in healer.batches(range(20)):
            first.step(healer, number)
            if healer.step == 12:
                break
    again = loop_of("torch", Faults())
    with Healer(rules(), state=again.state, store=tmp_path) as healer:
        for number in healer.batches(range(20)):
            again.step(healer, number)
    cost = healer.stats()
    assert cost.restores_s > 0
    assert 0 < cost.steps < 20


def test_the_wait_for_a_step_is_no_cost(tmp_path, monkeypatch):
    """In JAX the numbers of a step arrive when the device has computed them."""
    from healcore.torch.driver.pending_step import PendingStep

    steps = PendingStep.steps

    def late(self: PendingStep) -> Any:
        time.sleep(0.02)
        return steps(self)

    monkeypatch.setattr(PendingStep, "steps", late)
    loop = loop_of("torch", Faults())
    with Healer(rules(), state=loop.state) as healer:
        for number in healer.batches(range(30)):
            loop.step(healer, number)
    cost = healer.stats()
    assert cost.seconds > 0.6
    assert cost.between_steps_s < 0.3


def test_attach_alone():
    loop = loop_of("torch", Faults())
    heal = attach(loop.optimizer, "default")
    in_step = 0.0
    for number in range(10):
        inputs, targets = map(torch.from_numpy, loop.faults.batch(number))
        loss = (loop.model(inputs) - targets).square().mean()
        heal.observe(loss)
        loss.backward()
        began = time.perf_counter()
        loop.optimizer.step()
        in_step += time.perf_counter() - began
        loop.optimizer.zero_grad()
    cost = heal.stats()
    assert cost.steps == 10
    assert cost.in_steps_s is not None
    assert 0 < cost.in_steps_s < in_step < cost.seconds
    assert cost.host_bytes == 0
    assert (cost.host_syncs, cost.forward_passes, cost.written_bytes) == (0, 0, 0)
    assert cost.total_s == cost.in_steps_s


def test_steps_before_the_healer_do_not_count():
    loop = loop_of("torch", Faults())
    heal = attach(loop.optimizer, rules())
    for number in range(5):
        loop.step(None, number)
    with Healer(rules(), state=loop.state) as healer:
        for number in healer.batches(range(3)):
            loop.step(healer, number)
    whole, run = heal.stats(), healer.stats()
    assert (whole.steps, run.steps) == (8, 3)
    assert whole.in_steps_s is not None
    assert run.in_steps_s is not None
    assert 0 < run.in_steps_s < whole.in_steps_s


def test_the_time_of_an_inner_part_does_not_count_for_the_outer():
    meter = Meter()
    start = meter._since
    assert meter.switch("between_steps", start + 1) == "training"
    assert meter.switch("saves", start + 3) == "between_steps"
    assert meter.switch("between_steps", start + 7) == "saves"
    meter.exclude(0.5)
    assert meter.switch("training", start + 8) == "between_steps"
    meter._since = time.monotonic()
    cost = meter.add_to(Cost(host_syncs=0))
    assert (cost.between_steps_s, cost.saves_s) == pytest.approx((2.5, 4), abs=1e-6)
    assert cost.seconds == pytest.approx(8, abs=0.1)
    with pytest.raises(KeyError), meter.part("restores"):
        raise KeyError
    assert meter.switch("training", time.monotonic()) == "training", "also after an exception"


def test_the_line():
    cost = Cost(312.0, 1000, 0.3, 0.21, 1.1, 0.0, 0.2, 1, 1000, 80_000_000, 240_000_000)
    assert str(cost) == (
        "healing took 0.58 % of 312 s: 0.3 s in steps, 0.21 s between steps, 1.1 s saves, "
        "0.2 s comparisons (1 forward pass), 1,000 host syncs, 80.0 MB of host memory, "
        "240.0 MB written"
    )
    compiled = Cost(20.0, comparisons_s=7.0, forward_passes=3, first_pass_s=6.5)
    assert "(3 forward passes; 6.5 s the first one, which may compile loss_fn)" in str(compiled)
    assert str(Cost()) == "healing took 0 % of 0 s"
    unknown = Cost(1.0, host_bytes=None, written_bytes=None)
    assert unknown.known().keys().isdisjoint({"host_bytes", "written_bytes", "in_steps_s"})
