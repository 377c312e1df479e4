"""A learning rate of exactly 1 is a known rate: a run at 1.0 is judged like a run at 0.999."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore import Healer, Logging
from healcore.jax import protect

STEPS, DAMAGED_STEP = 330, 230


def share_of_rate(step: int) -> float:
    """The rate is highest between two checkpoints, so that only steps know the highest rate."""
    return 1.0 if step % 100 in range(20, 80) else 0.5


def target(number: int) -> np.ndarray:
    return 0.1 * np.random.default_rng(number).standard_normal(8).astype(np.float32)


CURVATURE = np.linspace(0.01, 0.1, 8, dtype=np.float32)


def train_torch(rate: float, logging: Logging, *, as_tensor: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(8))

    def as_given(value: float) -> Any:
        return torch.tensor(value) if as_tensor else value

    optimizer = torch.optim.SGD([weight], lr=as_given(rate))
    is_damaged = False

    def loss_fn(number: int) -> torch.Tensor:
        distance = (weight - torch.from_numpy(target(number))).square()
        return (torch.from_numpy(CURVATURE) * distance).sum() / 2 + 1.0

    state = {"weight": weight, "optimizer": optimizer}
    with Healer("default", state=state, logging=logging, loss_fn=loss_fn) as healer:
        for number in healer.batches(range(STEPS)):
            optimizer.param_groups[0]["lr"] = as_given(rate * share_of_rate(healer.step))
            if healer.step == DAMAGED_STEP and not is_damaged:
                is_damaged = True
                with torch.no_grad():
                    weight.fill_(9.0)
            optimizer.zero_grad()
            healer.loss(number).backward()
            optimizer.step()


def train_jax(rate: float, logging: Logging, *, injected: bool) -> None:
    def schedule(count: Any) -> Any:
        return rate * jnp.where(((count % 100) // 20) % 4 > 0, 1.0, 0.5)

    sgd = optax.sgd(schedule)
    if injected:
        sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    tx = protect(sgd)
    is_damaged = False

    def loss_fn(state: Any, batch: Any) -> jax.Array:
        return (CURVATURE * (state[0] - batch) ** 2).sum() / 2 + 1.0

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: loss_fn((w,), batch))(state[0])
        updates, opt_state = tx.update(grads, state[1], state[0], value=loss)
        return optax.apply_updates(state[0], updates), opt_state

    weight = jnp.ones(8)
    healer: Healer
    with Healer(
        "default", state=(weight, tx.init(weight)), logging=logging, loss_fn=loss_fn
    ) as healer:
        for batch in healer.batches([target(number) for number in range(STEPS)]):
            state = healer.state
            if healer.step == DAMAGED_STEP and not is_damaged:
                is_damaged = True
                state = jnp.full(8, 9.0), state[1]
            healer.update(step(state, batch), batch=batch)


def decisions(folder: Path, rate: float) -> list[tuple[Any, ...]]:
    """Step, checkpoint, held and limit of each rollback. The limit is a share of `rate`.

    The numbers of what is held have two digits: gradient norms differ a little between two rates.
    """
    found = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "rollback":
            limit = event.get("lr_limit")
            if limit is not None:
                limit = round(limit / rate, 5)
            held = [
                re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2g}", text)
                for text in event.get("held", ())
            ]
            found.append((event["step"], event["checkpoint"], held, limit))
    return found


@pytest.mark.parametrize(
    ("train", "option"),
    [
        (train_torch, {"as_tensor": False}),
        pytest.param(train_torch, {"as_tensor": True}, marks=pytest.mark.slow),
        pytest.param(train_jax, {"injected": True}, marks=pytest.mark.slow),
        pytest.param(train_jax, {"injected": False}, marks=pytest.mark.slow),
    ],
)
def test_a_run_at_a_rate_of_1_is_healed_like_a_run_at_0999(train, option, tmp_path):
    """The rate was as high before, so that it is no suspect."""
    found = []
    for rate in (0.999, 1.0):
        folder = tmp_path / str(rate)
        folder.mkdir()
        train(rate, Logging(events=folder / "events.jsonl", console=False), **option)
        found.append(decisions(folder, rate))
    assert found[0] == found[1]
    [(_, checkpoint, held, limit)] = found[0]
    assert (checkpoint, limit) == (200, None)
    assert all("gradient norm" in each for each in held), "of the damaged weights"


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_metrics_have_a_rate_of_0_and_of_1(rate, tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=rate)
    path = tmp_path / "m.jsonl"
    state = {"weight": weight, "optimizer": optimizer}
    with Healer("default", state=state, logging=Logging(metrics=path, console=False)) as healer:
        for _ in healer.batches(range(4)):
            optimizer.zero_grad()
            loss = 1e-3 * weight.square().sum()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
    assert [json.loads(line)["lr"] for line in path.open()] == [rate] * 4
