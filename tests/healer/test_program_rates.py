"""The program's own learning rate, edited before a restart."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch

from healcore import Checkpoints, Healer
from healcore.jax import protect
from tests.healer.run_directory import new_process
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, rules

POLICY = rules()
STEPS = 40


class TorchProgram:
    """A model of torch with a constant rate."""

    def __init__(self, rate: float) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, healer: Healer, batch: Any) -> None:
        inputs, targets = map(torch.from_numpy, batch)
        loss = (self.model(inputs) - targets).square().mean()
        healer.observe(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class JaxProgram:
    """A model of JAX, whose rate is a number of its state."""

    def __init__(self, rate: float) -> None:
        params = {"w": jnp.zeros((4, 1))}
        self.tx = protect(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), POLICY)
        self.state = {"params": params, "opt": self.tx.init(params)}

    def step(self, healer: Healer, batch: Any) -> None:
        inputs, targets = batch
        params = healer.state["params"]

        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((inputs @ params["w"] - targets) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = self.tx.update(grads, healer.state["opt"], params, value=loss)
        healer.update({"params": optax.apply_updates(params, updates), "opt": opt})


def train(program: TorchProgram | JaxProgram, folder: Path, stop_at: int) -> None:
    """Trains up to a step, where the process ends."""
    new_process()
    checkpoints, faults = Checkpoints(every=5), Faults()
    with Healer(POLICY, state=program.state, store=folder, checkpoints=checkpoints) as healer:
        for number in healer.batches(range(STEPS)):
            program.step(healer, faults.batch(number))
            if healer.step == stop_at:
                break


PROGRAMS = {"torch": TorchProgram, "jax": JaxProgram}


@BOTH_FRAMEWORKS
def test_a_start_names_a_rate_that_was_edited(framework, tmp_path, caplog):
    for stop_at, rate, says in ((6, 0.001, False), (12, 0.001, False), (18, 0.0005, True)):
        caplog.clear()
        train(PROGRAMS[framework](rate), tmp_path, stop_at)
        assert ("0.001 -> 0.0005; numbers in the state stay as saved" in caplog.text) is says
