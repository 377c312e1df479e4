"""A run that is started again with other hyperparameters says so, and says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Healer
from healcore.jax import protect
from healcore.runtime.loop.start import StoreNotEmpty
from healcore.runtime.loop.termination import AlreadyCompleted
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import SKIPS

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
