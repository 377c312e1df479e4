"""One policy file decides the same in a torch loop, HF's Trainer, Lightning and a JAX loop.

Every loop sees the same losses and gradients, bit for bit: the value of `loss + (w - constant w) g`
is `loss`, and its gradient is g, whatever w is by then.
"""

import functools
import operator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lightning
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import healcore.jax
import healcore.torch
from healcore.core.decision import Cause, Decision
from healcore.torch import HealingCallback, LightningHealingCallback
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.lightning import fits

RATE = 0.125
STEPS = 160
SIZE = 4

POLICY = """
schema = 1
name = "four"
description = "clips, skips and cuts, with short warm-ups"
clip = { kind = "zclip", warmup_steps = 10, max_norm = 4.0 }
respond = [
    { to = ["nonfinite"], do = ["skip", "alert"] },
    { to = ["nonfinite"], do = ["cut_lr"], when = { consecutive = 3 } },
    { to = ["grad_spike"], do = ["skip"] },
    { to = ["loss_spike", "vanishing"], do = ["alert"] },
]
lr = { factor = 0.5, hold_steps = 10, ramp_steps = 20 }
[detect]
nonfinite = {}
grad_spike = { window = 10, z_threshold = 6.0 }
loss_spike = { window = 16 }
vanishing = { patience = 3 }
"""


def read(decision: Any) -> Decision:
    """A decision in Python's numbers."""
    return Decision(*(None if each is None else np.asarray(each).item() for each in decision))


def flags(run: list[Decision]) -> list[Decision]:
    """All but the factors, which are compared with a tolerance."""
    return [each._replace(grad_scale=0.0, lr_scale=0.0) for each in run]


def signals() -> list[tuple[np.ndarray, np.ndarray]]:
    """Losses and gradients of a noisy descent, with single faults and a series of them."""
    rng = np.random.default_rng(0)
    losses = (2 + 3 * np.exp(-np.arange(STEPS) / 40) + 0.1 * rng.normal(size=STEPS)).astype("f")
    grads = rng.normal(size=(STEPS, SIZE)).astype("f")
    losses[30] = np.nan
    grads[45, 2] = np.nan
    grads[60] *= 100
    losses[75] *= 10
    losses[90:94] = np.inf
    grads[110:116] = 0
    grads[130:150] *= 3
    return list(zip(losses, grads, strict=True))


class Given(nn.Module):
    """A model whose loss and gradient are given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE))

    def forward(self, loss: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        change = (self.w - self.w.detach()) * gradient.reshape(SIZE)
        return {"loss": loss.reshape(()) + change.sum()}


def rows() -> Any:
    """The signals as a data set, for loaders that collate."""
    return [{"loss": torch.tensor(x), "gradient": torch.from_numpy(g)} for x, g in signals()]


def torch_loop(policy: Path | str) -> list[Decision]:
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    heal = healcore.torch.attach(optimizer, policy)
    decided = []
    for batch in DataLoader(rows()):
        loss = model(**batch)["loss"]
        heal.observe(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decided.append(read(heal.last_decision()))
    return decided


def huggingface_loop(policy: Path) -> list[Decision]:
    healing = HealingCallback(policy)
    decided = []

    def keep(state: Any, **kwargs: Any) -> None:
        assert healing.healing is not None
        decided.append(read(healing.healing.last_decision()))

    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    arguments = TrainingArguments(
        output_dir=str(policy.parent / "huggingface"),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        max_grad_norm=4.0,  # the limit of the policy; the lower one would hold
        remove_unused_columns=False,
        **small_runs.QUIET,
    )
    small_runs.InOrder(
        model,
        arguments,
        train_dataset=rows(),
        optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
        callbacks=[small_runs.calling("on_step_end", keep), healing],
    ).train()
    return decided


def lightning_loop(policy: Path) -> list[Decision]:
    healing = LightningHealingCallback(policy)
    decided = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Given()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    class Keep(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            decided.append(read(healing.healings["optimizer"].last_decision()))

    fits.trainer(healing, Keep(), max_epochs=1).fit(Module(), DataLoader(rows()))
    return decided


def jax_loop(policy: Path | str) -> list[Decision]:
    tx = healcore.jax.protect(optax.sgd(RATE), policy)

    @jax.jit
    def step(w: Any, state: Any, loss: Any, gradient: Any) -> Any:
        def loss_of(w: Any) -> Any:
            return loss + ((w - jax.lax.stop_gradient(w)) * gradient).sum()

        value, grads = jax.value_and_grad(loss_of)(w)
        updates, state = tx.update(grads, state, w, value=value, learning_rate=RATE)
        return optax.apply_updates(w, updates), state, healcore.jax.last_decision(state)

    w = jnp.ones(SIZE)
    state = tx.init(w)
    decided = []
    for loss, gradient in signals():
        w, state, decision = step(w, state, loss, gradient)
        decided.append(read(decision))
    return decided


LOOPS = {"huggingface": huggingface_loop, "lightning": lightning_loop, "jax": jax_loop}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("four") / "four.toml"
    path.write_text(POLICY)
    return path


@pytest.fixture(scope="module")
def expected(policy: Path) -> list[Decision]:
    return torch_loop(policy)


def test_the_signals_bring_every_kind_of_decision(expected: list[Decision]):
    causes = functools.reduce(operator.or_, (each.cause for each in expected))
    spikes = Cause.GRAD_SPIKE | Cause.LOSS_SPIKE | Cause.GRAD_VANISHING
    assert causes == Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD | spikes
    assert sum(each.skip for each in expected) >= 6
    assert {each.lr_scale for each in expected} > {0.5, 1.0}, "a cut, a ramp, and back"
    assert any(0 < each.grad_scale < 1 and not each.skip for each in expected)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_decides_as_the_engine(loop: str, policy: Path, expected: list[Decision]):
    found = LOOPS[loop](policy)
    assert len(found) == STEPS
    assert flags(found) == flags(expected)
    # XLA may fuse what NumPy rounds in between: one float32 ulp per running mean.
    tolerance = 0.0 if loop != "jax" else 4 * float(np.finfo("f").eps)
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        factors = theirs.grad_scale, theirs.lr_scale
        assert (mine.grad_scale, mine.lr_scale) == pytest.approx(factors, rel=tolerance, abs=0), i


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["default", "pretraining"])
def test_protect_alone_gives_the_causes_of_attach(preset: str):
    of_torch = torch_loop(preset)
    of_jax = jax_loop(preset)
    assert flags(of_torch) == flags(of_jax)
    assert any(each.cause for each in of_torch)
