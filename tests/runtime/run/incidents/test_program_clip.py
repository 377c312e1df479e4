"""A program that clips its gradients itself gets one line, and no other program does."""

import logging
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from healcore.jax import protect
from healcore.runtime.healer import Healer
from healcore.runtime.run.incidents.program_clip import CLIPPED_STEPS, ProgramClip
from healcore.torch import attach

LINE = "the program clips its gradients before healcore measures them"


def lines_of(norms: Iterable[float]) -> list[str]:
    clip = ProgramClip("torch")
    return [line for norm in norms if (line := clip.add(float(norm)))]


def clipped(norms: np.ndarray, limit: float) -> np.ndarray:
    norms = norms.astype(np.float32)
    factors = np.minimum(np.float32(limit) / (norms + np.float32(1e-6)), np.float32(1))
    return norms * factors


RANDOM = np.random.default_rng(0)
SPREAD = RANDOM.lognormal(0.0, 0.7, 20_000)


@pytest.mark.parametrize("limit", [0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 40.0])
def test_each_usual_limit_is_noticed_once(limit: float):
    (line,) = lines_of(clipped(SPREAD * limit, limit))
    assert LINE in line
    assert f'clip={{"max_norm": {limit:g}}}' in line


HEALTHY = {
    "noise": SPREAD,
    "noise around a round number": 1.0 + 1e-3 * RANDOM.standard_normal(20_000),
    "a constant gradient": np.full(100, 2.0),
    "a slow rise past a round number": np.linspace(0.999, 1.001, 20_000),
    "a slow rise at a round number": 1.0 + 1e-9 * np.arange(2_000),
    "rounding noise": 1.2345 + 1e-7 * RANDOM.standard_normal(2_000),
    "a slow fall": np.linspace(2.0, 1.0, 20_000),
    "a plateau": np.concatenate([[3.7], np.full(100, 1.0), SPREAD[:100]]),
    "a plateau after the highest norm": np.concatenate([[9.0], clipped(SPREAD, 1.0)]),
    "zeros": np.zeros(100),
    "a converged run": np.append(1.7e-7, 1.7e-7 * RANDOM.random(100)),
    "small gradients": np.append(2e-6, 2e-6 * RANDOM.random(100)),
    "NaN": np.full(100, np.nan),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_line_without_a_clip(name: str):
    assert not lines_of(HEALTHY[name])


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, heal: Any, *, clip: float) -> None:
    for _ in range(3 * CLIPPED_STEPS):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 4)) - 3).square().mean()
        heal.observe(loss)
        loss.backward()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_a_clip_of_the_program_is_named_once_with_attach(
    clip: float, caplog: pytest.LogCaptureFixture
):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with caplog.at_level(logging.INFO, "healcore"):
        trained(optimizer, model, attach(optimizer), clip=clip)
    assert caplog.text.count(LINE) == bool(clip)


def test_a_healer_warns_that_the_program_clips_in_torch(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with caplog.at_level(logging.INFO, "healcore"), Healer(state=state, store=tmp_path) as healer:
        for _ in healer.steps(3 * CLIPPED_STEPS):
            loss = (model(torch.randn(8, 4)) - 3).square().mean()
            healer.observe(loss)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert caplog.text.count(LINE) == 1
    assert "to healcore, which clips to the same bits" in caplog.text


@pytest.mark.parametrize("inside", [False, True])
def test_a_healer_warns_that_the_program_clips_in_jax(
    inside: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture
):
    """A clip inside of `protect` comes after the norm, and loses nothing."""
    clip = optax.clip_by_global_norm(0.5)
    sgd = optax.sgd(1e-3)
    tx = protect(optax.chain(clip, sgd)) if inside else optax.chain(clip, protect(sgd))
    params = {"w": jnp.ones(4)}

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] - 3) ** 2))(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    batches = np.random.default_rng(0).standard_normal((3 * CLIPPED_STEPS, 8, 4), np.float32)
    state = params, tx.init(params)
    with caplog.at_level(logging.INFO, "healcore"), Healer(state=state, store=tmp_path) as healer:
        for batch, (now, optimizer_state) in healer.batches(list(batches)).with_state():
            healer.update(step(now, optimizer_state, batch))
    assert caplog.text.count(LINE) == (not inside)
    advice = 'Remove the clip, and pass clip={"max_norm": 0.5} to both protect and Healer'
    assert (advice in caplog.text) == (not inside)
    assert "same bits" not in caplog.text
