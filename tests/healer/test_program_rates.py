"""The program's own learning rate: after a rollback, after a restart, and edited before a restart.

A counter of the program goes back neither with a rollback nor with a restart.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from healcore import Checkpoints, Healer
from healcore.jax import protect
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, rules

POLICY = rules()
STEPS = 40
TX = protect(optax.sgd(1.0), policy=POLICY)


class TorchProgram:
    """A model of torch, whose rate is set by the program or by a scheduler of the state."""

    def __init__(
        self,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        first_rate: float = 0.01,
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=first_rate)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.scheduler = None
        if make_scheduler is not None:
            self.scheduler = self.state["scheduler"] = make_scheduler(self.optimizer)

    def step(self, healer: Healer, batch: Any, rate: float | None) -> None:
        inputs, targets = map(torch.from_numpy, batch)
        if self.scheduler is None and rate is not None:
            self.optimizer.param_groups[0]["lr"] = rate
        loss = (self.model(inputs) - targets).square().mean()
        healer.observe(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        elif self.scheduler is not None:
            self.scheduler.step()


class JaxProgram:
    """A model of JAX, whose rate is given to each update, or is a number of its state."""

    def __init__(self, tx: Any = TX) -> None:
        params = {"w": jnp.zeros((4, 1))}
        self.tx = tx
        self.state: dict[str, Any] = {"params": params, "opt": tx.init(params)}

    def step(self, healer: Healer, batch: Any, rate: float | None) -> None:
        inputs, targets = batch
        params = healer.state["params"]

        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((inputs @ params["w"] - targets) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        rates = {} if rate is None else {"learning_rate": rate}
        updates, opt = self.tx.update(grads, healer.state["opt"], params, value=loss, **rates)
        updates = jax.tree.map(lambda update: update * (rate or 1.0), updates)
        healer.update({"params": optax.apply_updates(params, updates), "opt": opt})


def decay(step: int) -> float:
    return 0.005 * (1 + math.cos(math.pi * step / STEPS))


def constant(step: int) -> float:
    return 0.01


def not_set(step: int) -> None:
    """The rate is a number of the optimizer, which the loop does not change."""


def drops(step: int) -> float:
    return 0.01 * 0.1 ** (step // 11)


def complaints(
    program: TorchProgram | JaxProgram,
    folder: Path,
    *,
    own: bool,
    rate: Callable[[int], float | None] = decay,
    faults: Faults | None = None,
    stop_at: int = -1,
) -> list[str]:
    """Trains up to a step, where the process ends, and returns what is said about the rate."""
    new_process()
    faults = faults or Faults()
    counter = 0
    with Healer(
        POLICY, state=program.state, store=folder, checkpoints=Checkpoints(every=5)
    ) as healer:
        for number in healer.batches(range(STEPS)):
            program.step(healer, faults.batch(number), rate(counter if own else healer.step))
            counter += 1
            if healer.step == stop_at:
                break
    said = [event["problem"] for event in events(folder, "problem")]
    return [problem for problem in said if "learning rate" in problem]


def program_of(framework: str) -> TorchProgram | JaxProgram:
    return TorchProgram() if framework == "torch" else JaxProgram()


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("own", [True, False])
def test_a_rollback_does_not_reset_a_counter_of_the_program(framework, own, tmp_path):
    program = program_of(framework)
    said = complaints(program, tmp_path, own=own, faults=Faults(once=[12, 13, 22]))
    if own:
        (line,) = said
        assert "at this step before the rollback" in line
        assert "does not follow healer.step" in line
    else:
        assert said == []


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("rate", [decay, drops])
@pytest.mark.parametrize("own", [True, False])
def test_a_restart_does_not_restore_a_counter_of_the_program(framework, own, rate, tmp_path):
    program = program_of(framework)
    assert complaints(program, tmp_path, own=own, rate=rate, stop_at=16) == []
    said = complaints(program_of(framework), tmp_path, own=own, rate=rate)
    if own:
        (line,) = said
        assert "as at the start of the run" in line
        assert "does not follow healer.step" in line
    else:
        assert said == []


@pytest.mark.parametrize("rate", [constant, lambda step: 0.01 / (1 + step % 4)])
def test_a_rate_that_is_constant_or_cyclic_does_not_begin_again_by_a_restart(rate, tmp_path):
    complaints(TorchProgram(), tmp_path, own=False, rate=rate, stop_at=16)
    assert complaints(TorchProgram(), tmp_path, own=False, rate=rate) == []


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    ],
)
def test_a_scheduler_of_the_state_goes_back_with_the_run(make_scheduler, tmp_path):
    faults = Faults(once=[12, 13, 22])
    program = TorchProgram(make_scheduler)
    assert complaints(program, tmp_path, own=True, faults=faults, stop_at=26) == []
    assert complaints(TorchProgram(make_scheduler), tmp_path, own=True) == []


def edited(framework: str, rate: float) -> TorchProgram | JaxProgram:
    """A program whose rate is a number of its state, in the form after an edit."""
    if framework == "torch":
        return TorchProgram(first_rate=rate)
    return JaxProgram(protect(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), POLICY))


@BOTH_FRAMEWORKS
def test_a_start_says_that_the_rate_of_the_checkpoint_replaces_an_edited_one(
    framework, tmp_path, caplog
):
    for stop_at, rate, says in ((6, 0.001, False), (12, 0.001, False), (18, 0.0005, True)):
        caplog.clear()
        complaints(edited(framework, rate), tmp_path, own=False, rate=not_set, stop_at=stop_at)
        assert ("checkpoint, 0.001, replaces the program's 0.0005" in caplog.text) is says


def test_a_start_says_nothing_of_the_kind_if_a_schedule_has_changed_the_rate(tmp_path, caplog):
    for stop_at, rate in ((6, 0.001), (12, 0.0005)):
        program = TorchProgram(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 90), rate)
        complaints(program, tmp_path, own=False, stop_at=stop_at)
    assert "0.001 -> 0.0005" in caplog.text
    assert "replaces the program's" not in caplog.text
