"""Damage that comes back: what left its healthy range is held in it while the steps repeat."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Checkpoints, Healer, Logging
from healcore.runtime.run.rollback import holding
from healcore.runtime.trainer_access import trainer_access_of
from healcore.tools.report.run_report import read_reports
from tests.open_run import run_of

STEPS, FIRST, LAST = 360, 305, 335
"""Steps of a run, and the steps of a fault that is a part of the program."""


class Program:
    """Regression by a small net. A fault recurs whenever its step is repeated."""

    def __init__(
        self,
        *,
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        numbers: dict[str, Any] | None = None,
        grads: Callable[[torch.Tensor], Any] | None = None,
        bad_steps: Any = range(FIRST, LAST),
        labels: bool = False,
        clip_until: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.state: dict[str, Any] = {}
        """What the state has beside the model and the optimizer."""
        (group,) = self.optimizer.param_groups
        self.usual = {name: group[name] for name in numbers or {}}
        self.numbers = numbers or {}
        self.grads = grads
        self.bad_steps = bad_steps
        self.clip_until = clip_until
        self.rewinds = True
        """Whether the batches are a list, and not a generator."""
        make = torch.Generator().manual_seed(1)
        target = torch.randn(8, generator=make)
        self.batches = []
        for step in range(STEPS + 10):
            x = torch.randn(32, 8, generator=make)
            y = torch.tanh(x @ target)[:, None] + 0.1 * torch.randn(32, 1, generator=make)
            if clip_until is not None and step % 16 == 4:
                y = 20 * y  # a heavy tail, for which the program clips
            if labels and step in bad_steps:
                y = 10 * torch.randn(32, 1, generator=make)
            self.batches.append((step, x, y))

    def loss(self, batch: Any) -> torch.Tensor:
        _, x, y = batch
        return (self.model(x) - y).square().mean()

    def step(self, number: int) -> None:
        bad = number in self.bad_steps
        (group,) = self.optimizer.param_groups
        group.update(self.numbers if bad else self.usual)
        if bad and self.grads is not None:
            for p in self.model.parameters():
                self.grads(p.grad)  # type: ignore[arg-type]
        if self.clip_until is not None and number < self.clip_until:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(
        self, folder: Path | None = None, log: Logging | None = None, *, healed: bool = True
    ) -> list[dict[str, Any]]:
        """Trains, and returns the events of the rollbacks."""
        if not healed:
            for batch in self.batches[:STEPS]:
                self.loss(batch).backward()
                self.step(batch[0])
            return []
        assert folder is not None
        state = {"model": self.model, "optimizer": self.optimizer, **self.state}
        log = log or Logging(events=folder / "events.jsonl", console=False)
        with Healer(state=state, loss_fn=self.loss, logging=log) as self.healer:
            data = self.batches[:STEPS]
            for batch in self.healer.batches(data if self.rewinds else iter(data)):
                self.healer.loss(batch).backward()
                self.step(batch[0])
        lines = (folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [each for each in events if each["kind"] == "rollback"]

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def unseen_loss(self) -> float:
        with torch.no_grad():
            usual = [batch for batch in self.batches[STEPS:] if batch[0] % 16 != 4]
            return float(sum(self.loss(batch) for batch in usual))


SGD = {"optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9}
FAULTS: dict[str, dict[str, Any]] = {
    "weight decay": {"lr": 1e-2, "numbers": {"weight_decay": 40.0}},
    "betas": {"lr": 1e-2, "numbers": {"betas": (0.9999, 0.999)}},
    "momentum": {**SGD, "numbers": {"momentum": 1.2}, "bad_steps": range(305, 325)},
    "fused": {"lr": 1e-2, "fused": True, "numbers": {"weight_decay": 40.0}},
    "gradients": {**SGD, "grads": lambda g: g.mul_(4096), "bad_steps": (220, 223, 226, 230)},
    "gradients again": {**SGD, "grads": lambda g: g.mul_(4096), "bad_steps": (220, 223, 260, 300)},
    "labels": {"lr": 1e-2, "labels": True, "bad_steps": range(310, 322)},
    "signs": {**SGD, "grads": lambda g: g.neg_(), "bad_steps": range(220, 232)},
}
HELD = {"weight decay": "weight_decay", "betas": "betas[0]", "momentum": "momentum"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_run_ends_as_without_the_fault(tmp_path, name):
    """Without healcore it ends at least twice as bad."""
    clean = Program(**{**FAULTS[name], "bad_steps": ()})
    clean.train(healed=False)
    damaged = Program(**FAULTS[name])
    damaged.train(healed=False)
    assert not damaged.unseen_loss() < 2 * clean.unseen_loss()
    healed = Program(**FAULTS[name])
    rollbacks = healed.train(tmp_path)
    assert healed.unseen_loss() < 1.1 * clean.unseen_loss()
    assert all(each.get("held") or each["batches"] for each in rollbacks)
    assert len(rollbacks) in (1, 2, 3), "two troubles may be of one fault"
    (group,) = healed.optimizer.param_groups
    assert {entry: group[entry] for entry in healed.usual} == healed.usual


@pytest.mark.slow
def test_a_clip_that_the_program_forgets_is_replaced(tmp_path):
    options = {**SGD, "momentum": 0.0}
    clean, damaged = Program(**options, clip_until=STEPS), Program(**options, clip_until=220)
    clean.train(healed=False)
    damaged.train(healed=False)
    assert damaged.unseen_loss() > 2 * clean.unseen_loss()
    healed = Program(**options, clip_until=220)
    healed.train(tmp_path)
    assert healed.unseen_loss() < 1.25 * clean.unseen_loss()
    held = run_of(healed.healer).holding.envelope
    limit = pytest.approx(0.5, rel=1e-3)
    assert held.norms["optimizer"] == limit, "still needed"


@pytest.mark.slow
def test_what_is_held_is_released_when_the_fault_is_over(tmp_path):
    program = Program(**{**FAULTS["weight decay"], "bad_steps": range(220, 250)})
    *_, last = program.train(tmp_path)
    assert last["held"] == ["optimizer.weight_decay held at 0.01, the program sets 40"]
    assert not run_of(program.healer).holding.envelope
    engines = trainer_access_of(program.healer).driver.engines()
    assert engines["optimizer"]["state"]["norm_limit"] == 0


class Killed(BaseException):
    """Ends the process between two steps."""


@pytest.mark.slow
def test_a_restart_within_the_frozen_steps_ends_with_the_same_bits(tmp_path):
    """The checkpoint at step 224 is a frozen step. The weights do not show that it is frozen."""
    found, frozen = [], []
    for kills in ([], [226]):
        store = tmp_path / str(len(kills))
        for _ in range(len(kills) + 1):
            program = Program(**FAULTS["signs"])
            state = {"model": program.model, "optimizer": program.optimizer}
            every = Checkpoints(every=32)
            log = Logging(console=False)
            with (
                suppress(Killed),
                Healer(
                    state=state, store=store, loss_fn=program.loss, checkpoints=every, logging=log
                ) as healer,
            ):
                for batch in healer.batches(program.batches[:STEPS]):
                    held = run_of(healer).holding.envelope
                    if held.freezes(batch[0]) and healer.step in kills:
                        kills.clear()
                        raise Killed
                    healer.loss(batch).backward()
                    program.step(batch[0])
            frozen.append(held.frozen)
        found.append(torch.cat([p.detach().flatten() for p in program.model.parameters()]))
    assert torch.equal(*found)
    assert len(frozen) == 3
    assert len(set(frozen)) == 1
    first, last = frozen[0]
    assert first < 224 < 226 < last


@pytest.mark.slow
def test_what_was_skipped_is_the_same_in_every_source(tmp_path):
    """In the log, in the metrics, in the postmortem and in the report."""
    program = Program(**FAULTS["signs"])
    steps, story = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    rollbacks = program.train(tmp_path, Logging(events=story, metrics=steps))
    (text,) = [each for each in rollbacks[-1]["held"] if "frozen" in each]
    first, end = (int(each) for each in re.findall(r"\d+", text))
    rows = map(json.loads, steps.read_text().splitlines())
    skipped = [row["step"] for row in rows if row.get("skip")]
    assert skipped == list(range(first, end + 1))
    report = program.healer.report()
    assert report.counts["skips"] == len(skipped)
    (read,) = read_reports(story)
    assert (read.counts.skips, read.counts.rollbacks) == (len(skipped), len(rollbacks))
    batches = sum(len(each.get("batches", ())) for each in rollbacks)
    told = " ".join(read.diagnosis.split())
    assert f"skipped {len(skipped)} steps" in told
    assert (f"left out {batches} batches" in told) == (batches > 0)


def test_an_alarm_names_the_rate_of_its_step(caplog):
    """The loop sets a wrong rate for a step, and the usual rate after it."""
    program = Program(**SGD)
    (group,) = program.optimizer.param_groups
    with Healer(
        state={"model": program.model, "optimizer": program.optimizer}, loss_fn=program.loss
    ) as healer:
        for batch in healer.batches(program.batches[:300]):
            healer.loss(batch).backward()
            group["lr"] = 50 * 0.05 if 200 <= batch[0] < 230 else 0.05
            program.step(batch[0])
            group["lr"] = 0.05
    alarms = [each.message for each in caplog.records if "loss spike" in each.message]
    assert alarms
    assert "learning rate 2.5" in alarms[0]


@pytest.mark.slow
def test_a_loss_fn_that_fails_among_the_frozen_steps_ends_the_freeze(tmp_path):
    """Without comparisons nobody asks any more whether the updates are right. They are made."""
    program = Program(**FAULTS["signs"])
    state = {"model": program.model, "optimizer": program.optimizer}
    parameter = next(program.model.parameters())
    frozen: Any = None
    trained = []

    def loss_fn(batch: Any) -> torch.Tensor:
        if frozen and not torch.is_grad_enabled():  # a comparison, not the training step
            raise ValueError("this loss_fn has broken")
        return program.loss(batch)

    with Healer(
        state=state,
        store=tmp_path,
        loss_fn=loss_fn,
        checkpoints=Checkpoints(every=32),
        logging=Logging(console=False),
    ) as healer:
        for batch in healer.batches(program.batches[:STEPS]):
            before = parameter.detach().clone()
            number = healer.step
            held = run_of(healer).holding.envelope
            if frozen is None and held.freezes(number):
                frozen = held.frozen
            healer.loss(batch).backward()
            program.step(batch[0])
            if frozen and not torch.equal(before, parameter):
                trained.append(number)
    assert frozen is not None
    _, last = frozen
    assert trained == list(range(last + 1, healer.step))


@pytest.mark.parametrize("rewinds", [True, False])
def test_a_number_that_the_program_keeps_is_used_in_the_end(tmp_path, monkeypatch, caplog, rewinds):
    """Held, a late regulariser looks like a healed fault. Then the run ends as without healcore."""
    monkeypatch.setattr(holding, "LASTING_STEPS", 20)
    late = {**FAULTS["weight decay"], "bad_steps": range(110, STEPS)}
    plain = Program(**late)
    plain.train(healed=False)
    program = Program(**late)
    program.rewinds = rewinds
    log = Logging(events=tmp_path / "events.jsonl")
    rollbacks = program.train(tmp_path, log)
    held = next(each for each in rollbacks if each.get("held"))
    assert held["held"] == ["optimizer.weight_decay held at 0.01, the program sets 40"]
    assert not run_of(program.healer).holding.envelope.numbers
    assert "optimizer.weight_decay of 40: the program has kept this for" in caplog.text
    exact = [torch.equal(a, b) for a, b in zip(plain.weights(), program.weights(), strict=True)]
    assert all(exact) == rewinds
    assert any(each.get("by") == "intended_numbers" for each in rollbacks) == rewinds


@pytest.mark.slow
def test_what_is_held_is_released_after_the_fault_also_if_the_loss_fn_fails(tmp_path):
    """The limits of the norms too, which nobody could let grow."""
    program = Program(**{**FAULTS["weight decay"], "bad_steps": range(220, 310)})
    state = {"model": program.model, "optimizer": program.optimizer}
    failed = False

    def loss_fn(batch: Any) -> torch.Tensor:
        nonlocal failed
        held = run_of(healer).holding.envelope
        if not torch.is_grad_enabled() and held:
            failed = True
            raise ValueError("this loss_fn has broken")
        return program.loss(batch)

    with Healer(state=state, loss_fn=loss_fn, checkpoints=Checkpoints(every=20)) as healer:
        for batch in healer.batches(program.batches[:STEPS]):
            healer.loss(batch).backward()
            program.step(batch[0])
        envelope = run_of(healer).holding.envelope
        assert not envelope.numbers
        assert not envelope.norms
    assert failed


def test_a_healthy_program_with_a_momentum_schedule_has_the_bits_of_a_run_without_healcore(
    tmp_path,
):
    found = []
    for healed in (False, True):
        program = Program(**SGD)
        schedule = torch.optim.lr_scheduler.OneCycleLR(program.optimizer, 0.1, STEPS)
        step = program.step
        program.step = lambda number, step=step, s=schedule: (step(number), s.step())  # type: ignore
        program.train(tmp_path, healed=healed)
        found.append(torch.cat([p.detach().flatten() for p in program.model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.slow
def test_a_rate_that_rises_from_a_checkpoint_on_is_not_learnt_as_healthy(tmp_path):
    """The scheduler has set the wrong rate of the next step when the checkpoint is made."""
    program = Program(lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        program.optimizer, lambda step: 100.0 if step in range(200, 240) else 1.0
    )
    step = program.step
    program.step = lambda number: (step(number), schedule.step())  # type: ignore[method-assign]
    program.state = {"scheduler": schedule}
    (rollback,) = program.train(tmp_path)
    assert rollback["lr_limit"] == pytest.approx(3e-3)
