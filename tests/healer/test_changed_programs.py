"""Another program than before: its hyperparameters at a restart, its parameters at any time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from healcore import Healer
from healcore.errors import StateMismatch
from healcore.jax import protect
from healcore.runtime.loop.start import StoreNotEmpty
from healcore.runtime.loop.termination import AlreadyCompleted
from healcore.runtime.store import Keep
from tests.healer.run_directory import events, flip_a_bit, new_process
from tests.healer.run_options import grouped
from tests.healer.training_loops import SKIPS, rules

ROWS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def fit(
    folder: Path, *, lr: float = 0.01, batch: int = 2, stop_at: int = 0, policy: Any = SKIPS
) -> float:
    """Trains on 40 rows, and returns the learning rate at the end."""
    new_process()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with Healer(policy, state=state, store=folder) as healer:
        for rows in healer.batches(DataLoader(ROWS, batch_size=batch)):  # type: ignore[arg-type]
            loss = model(rows).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if healer.step == stop_at - 1:
                raise KeyboardInterrupt
    return optimizer.param_groups[0]["lr"]


def warned(folder: Path) -> list[str]:
    return [event["problem"] for event in events(folder, "problem")]


def test_an_interrupted_run_that_is_given_another_learning_rate_says_which_holds(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, stop_at=8)
    rate = fit(tmp_path, lr=0.5)
    assert rate < 0.01
    (line,) = warned(tmp_path)
    assert "optimizer.lr: 0.01 -> 0.5" in line
    assert "empty directory" in line


def test_a_completed_run_that_is_given_another_learning_rate_is_not_returned(tmp_path: Path):
    fit(tmp_path)
    with pytest.raises(AlreadyCompleted, match="nothing to do"):
        fit(tmp_path)
    with pytest.raises(StoreNotEmpty, match=r"optimizer\.lr: 0\.01 -> 0\.5.*Nothing was trained"):
        fit(tmp_path, lr=0.5)
    with pytest.raises(AlreadyCompleted, match="nothing to do"):
        fit(tmp_path)  # the refusal has changed nothing


def test_a_changed_batch_size_and_policy_are_named(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, stop_at=8)
    fit(tmp_path, batch=4, policy="default")
    lines = warned(tmp_path)
    assert any("policy: 'skips (" in line and "-> 'default (" in line for line in lines)
    assert any("batch size: 2 -> 4" in line for line in lines)


def test_hyperparameters_of_a_jax_state(tmp_path: Path):
    def run(lr: float, steps: int) -> None:
        new_process()
        tx = optax.inject_hyperparams(optax.adam)(learning_rate=lr)
        tx = protect(tx, SKIPS)
        params = jnp.ones(3)
        state: Any = (params, tx.init(params))
        with Healer(SKIPS, state=state, store=tmp_path) as healer:
            for _ in healer.batches(list(range(6))):
                params, inner = healer.state
                updates, inner = tx.update(params, inner, params, value=jnp.sum(params))
                healer.update((optax.apply_updates(params, updates), inner))
                if healer.step == steps:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(0.001, 2)
    with pytest.raises(KeyboardInterrupt):
        run(0.001, 3)
    assert warned(tmp_path) == []
    run(0.5, 10)
    (line,) = warned(tmp_path)
    assert "learning_rate: 0.001 -> 0.5" in line
    with pytest.raises(StoreNotEmpty, match=r"learning_rate: 0\.001 -> 0\.5"):
        run(0.5, 10)


CHANGE = 20
CHANGES = ("unfreeze", "lora", "grow", "prune")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 1)
        self.lora: Any = None
        self.a.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        low_rank = 0.0 if self.lora is None else self.lora(x)
        return self.c(torch.tanh(self.b(x)) + low_rank)


class Run:
    def __init__(self, kind: str) -> None:
        self.kind, self.net, self.changed = kind, Net(), False
        groups = [{"params": self.net.b.parameters()}, {"params": self.net.c.parameters()}]
        self.optimizer = torch.optim.AdamW(groups, 1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.state = {"o": self.optimizer, "m": self.net, "s": self.scheduler}

    def change(self) -> None:
        net, groups, self.changed = self.net, self.optimizer.param_groups, True
        if self.kind == "unfreeze":
            net.a.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(net.a.parameters()), "lr": 1e-3})
        elif self.kind == "lora":
            net.lora = nn.Linear(4, 6, bias=False)
            self.optimizer.add_param_group({"params": list(net.lora.parameters())})
        elif self.kind != "none":
            width = 8 if self.kind == "grow" else 3
            old = [*net.b.parameters(), *net.c.parameters()]
            net.b, net.c = nn.Linear(4, width), nn.Linear(width, 1)
            for each in old:
                self.optimizer.state.pop(each, None)
            groups[0]["params"], groups[1]["params"] = [*net.b.parameters()], [*net.c.parameters()]

    def train(self, until: int = 60, bad: tuple[int, ...] = (), **options: Any) -> Any:
        def loss_fn(batch: int) -> torch.Tensor:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(batch))
            return functional.mse_loss(self.net(x), x.sum(1, keepdim=True))

        todo, options = {*bad}, {"save_every": 5, "policy": rules()} | options
        healer: Any = Healer(state=self.state, loss_fn=loss_fn, **grouped(options))
        with healer:
            self.first_step = healer.step
            for batch in healer.batches(range(60)):
                if healer.step == CHANGE and not self.changed:
                    self.change()
                if healer.step == until:
                    raise OSError("power")
                loss = loss_fn(batch)
                if healer.step in todo:
                    todo.discard(healer.step)
                    loss = loss * torch.nan
                healer.observe(loss)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return healer


@pytest.mark.parametrize("kind", CHANGES)
def test_a_start_does_not_fall_back_past_a_checkpoint_that_does_not_fit(kind: str, tmp_path: Path):
    with suppress(OSError):
        Run(kind).train(45, store=tmp_path)
    before = {each.name for each in tmp_path.glob("step-*")}
    with pytest.raises(StateMismatch, match="step 45 in "):
        Run(kind).train(store=tmp_path)
    assert {each.name for each in tmp_path.glob("step-*")} >= before
    run = Run(kind)
    run.change()
    with suppress(OSError):
        run.train(46, store=tmp_path)
    assert run.first_step == 45
    assert {each.name for each in tmp_path.glob("step-*")} >= before


def test_no_checkpoint_is_deleted_that_is_newer_than_the_resumed(tmp_path: Path):
    run = {"store": tmp_path, "keep": Keep(good=2, candidates=9, older=True)}
    with suppress(OSError):
        Run("none").train(45, **run)
    newest = sorted(tmp_path.glob("step-*"))[-3:]
    for folder in newest:
        flip_a_bit(folder, 1)
    again = Run("none")
    again.train(save_every=11, **run)
    assert again.first_step < int(newest[0].name.split("-")[1].split(".")[0])
    assert all(folder.is_dir() for folder in newest)
