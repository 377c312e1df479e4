"""The README's snippets run, and its links resolve."""

from __future__ import annotations

import re
import signal

import pytest

import healcore.torch
from tests.packaging.test_pages import DOCS, blocks, snippet, text

PAGE = "../README.md"
FIRST = "heal.observe(loss)"
JAX = "inject_hyperparams"
TORCH = "scheduler.step()"
TRAINERS = "SFTTrainer(..."


def test_every_snippet_is_run():
    """Of the snippet with ellipses the names exist; `test_trainer_pages` runs such programs."""
    known = [snippet(PAGE, part) for part in (FIRST, JAX, TORCH, TRAINERS)]
    assert sorted(known) == sorted(blocks(PAGE))
    named = re.findall(r"healcore\.torch\.(\w+)\(", known[-1])
    assert len(named) == 4
    assert set(named) <= set(healcore.torch.__all__)


def test_the_lines_of_the_first_screen():
    import jax.numpy as jnp
    import optax
    import torch

    weight = torch.nn.Parameter(torch.ones(3))
    params = {"w": jnp.ones(3)}
    scope = {
        "optimizer": torch.optim.AdamW([weight]),
        "loss": weight.square().sum(),
        "optax_optimizer": optax.adamw(1e-3),
        "params": params,
        "grads": {"w": jnp.full(3, jnp.nan)},
    }
    once, at_each_step = snippet(PAGE, FIRST).split("updates, opt_state", 1)
    exec(once, scope)
    scope["opt_state"] = scope["tx"].init(params)
    scope["loss"] = jnp.float32(1.0)
    exec("updates, opt_state" + at_each_step, scope)
    assert not scope["updates"]["w"].any(), "a NaN step changes nothing"
    weight.grad = torch.full((3,), torch.nan)
    scope["optimizer"].step()
    assert torch.equal(weight.detach(), torch.ones(3))
    assert int(scope["heal"].metrics()["heal/skips"]) == 1


def test_the_jax_snippet(tmp_path, monkeypatch):
    import jax.numpy as jnp

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    class Interrupted(list):
        def __getitem__(self, index):
            if index == 3:
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    monkeypatch.chdir(tmp_path)
    good, bad = jnp.ones((4, 3)), jnp.full((4, 3), jnp.nan)
    params = {"w": jnp.ones(3)}
    batches = [good, bad, *[good] * 4]
    scope = {"params": params, "loss_fn": loss_fn, "loader": Interrupted(batches)}
    with pytest.raises(KeyboardInterrupt):
        exec(snippet(PAGE, JAX), scope)
    assert scope["healer"].step in (3, 4)
    scope = {"params": params, "loss_fn": loss_fn, "loader": batches}
    exec(snippet(PAGE, JAX), scope)  # the same program resumes
    healer = scope["healer"]
    assert (healer.step, healer.report().counts["skips"]) == (6, 1)
    assert jnp.isfinite(healer.state[0]["w"]).all()
    assert not jnp.array_equal(healer.state[0]["w"], params["w"])
    assert jnp.array_equal(healer.state[0]["w"], scope["state"][0]["w"])


def test_the_torch_snippet(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    bad = torch.full((4, 3), torch.nan)
    before = model.weight.detach().clone()
    scope = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loss_fn": lambda model, batch: (model(batch) - 1).square().mean(),
        "loader": [*[torch.ones(4, 3)] * 12, *[bad] * 12, torch.ones(4, 3)],
    }
    exec(snippet(PAGE, TORCH), scope)
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)
    healer = scope["healer"]
    assert healer.rollbacks == 0  # the weights are finite: skipping them is enough
    assert healer.report().counts["skips"] == 12
    assert list(tmp_path.glob("checkpoints/step-*"))


def test_local_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text(PAGE))
    assert links
    assert [link for link in links if not (DOCS.parent / link).exists()] == []
