"""Runs in which no step is finite any more although the weights are finite: ruined, or bad data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore import Checkpoints
from healcore import policy as policies
from healcore.jax import protect
from healcore.runtime.healer import Healer
from healcore.runtime.reporting.nonfinite_steps import IN_A_ROW
from healcore.runtime.run.ending.exits import RunStopped
from tests.healer.run_directory import events, new_process
from tests.healer.run_options import grouped
from tests.healer.training_loops import BOTH_FRAMEWORKS

RATE = 0.05
TRUE = np.array([0.3, -0.6, 0.1, 0.8], np.float32)
STEPS = 240


def batch(number: int, bad: Any = ()) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    inputs = random.normal(size=(16, 4)).astype(np.float32)
    targets = np.exp(inputs @ TRUE + random.normal(size=16).astype(np.float32) / 10)
    return inputs * np.float32("nan" if number in bad else 1.0), targets


class TorchRun:
    """A Poisson regression with SGD and clipped gradients; batch `number` has rate `rate(number)`.

    At a rate a million times too high one step makes the weights so large that `exp` overflows in
    every later forward pass. The weights themselves are about 10,000, so they are finite.
    """

    def __init__(self, rate: Any = lambda number: RATE, bad: Any = ()) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.rate, self.bad = rate, bad
        self.numbers: list[int] = []

    def loss(self, number: int) -> torch.Tensor:
        inputs, targets = map(torch.from_numpy, batch(number, self.bad))
        predicted = self.model(inputs)[:, 0]
        return (predicted.exp() - targets * predicted).mean()

    def step(self, healer: Healer, number: int) -> None:
        self.numbers.append(number)
        self.optimizer.param_groups[0]["lr"] = self.rate(number)
        loss = self.loss(number)
        healer.observe(loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def error(self) -> float:
        return float(np.abs(self.model.weight.detach().numpy()[0] - TRUE).max())

    def weights(self) -> list[bytes]:
        return [each.detach().numpy().tobytes() for each in self.model.parameters()]


class JaxRun:
    """The same in JAX; the schedule's rate is in the state of `inject_hyperparams`."""

    def __init__(self, rate: Any = lambda number: RATE, bad: Any = ()) -> None:
        schedule = jnp.asarray([rate(number) for number in range(2 * STEPS)], jnp.float32)

        def clipped_sgd(learning_rate: Any) -> Any:
            return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(learning_rate, 0.5))

        tx = protect(optax.inject_hyperparams(clipped_sgd)(lambda count: schedule[count]))
        self.bad = bad
        self.state = (jnp.zeros(4), tx.init(jnp.zeros(4)))
        self.numbers: list[int] = []

        @jax.jit
        def step(state: Any, inputs: Any, targets: Any) -> Any:
            weights, memory = state
            loss, gradient = jax.value_and_grad(self.loss_of)(weights, inputs, targets)
            updates, memory = tx.update(gradient, memory, weights, value=loss)
            return optax.apply_updates(weights, updates), memory

        self._step = step

    @staticmethod
    def loss_of(weights: Any, inputs: Any, targets: Any) -> Any:
        predicted = inputs @ weights
        return jnp.mean(jnp.exp(predicted) - targets * predicted)

    def step(self, healer: Healer, number: int) -> None:
        self.numbers.append(number)
        self.state = self._step(healer.state, *batch(number, self.bad))
        healer.update(self.state)
        self.state = healer.state

    def error(self) -> float:
        return float(np.abs(np.asarray(self.state[0]) - TRUE).max())

    def weights(self) -> list[bytes]:
        return [np.asarray(self.state[0]).tobytes()]


RUNS = {"torch": TorchRun, "jax": JaxRun}


def raised(first: int, last: int) -> Any:
    return lambda number: RATE * (1e6 if first <= number <= last else 1.0)


def train(run: Any, store: Any, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    options = {"save_every": 25, **options}
    data = options.pop("data", range(steps))
    policy = options.pop("policy", policies.load("default", rollback={"probation": 20}))
    with Healer(policy, state=run.state, store=store, **grouped(options)) as healer:
        for number in healer.batches(data):
            run.step(healer, int(number))
        run.state = healer.state
        return {"rollbacks": healer.rollbacks}


def test_without_a_finite_step_nothing_is_tried(tmp_path):
    """No weights are known to be good: a rollback to the start would fail the same way."""
    with pytest.raises(RunStopped, match="none of the first 100 steps was finite"):
        train(TorchRun(bad=range(STEPS)), tmp_path)
    assert events(tmp_path, "rollback") == []


def test_overflows_of_a_grad_scaler_that_looks_for_its_scale_are_no_dead_run(tmp_path):
    """30 in a row: the scaler skips these steps itself, and they say nothing about the weights."""
    run = TorchRun()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
    state = {**run.state, "scaler": scaler}
    with Healer("default", state=state, store=tmp_path) as healer:
        for number in healer.batches(range(100)):
            loss = run.loss(number)
            healer.observe(loss)
            scaler.scale(loss).backward()
            if 50 <= number < 80 and run.model.weight.grad is not None:
                run.model.weight.grad.fill_(torch.inf)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        assert healer.rollbacks == 0
    assert [each["problem"] for each in events(tmp_path, "problem")] == []


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("last", [129, STEPS], ids=["for some steps", "for ever"])
def test_a_run_whose_rate_ruined_its_weights_is_brought_back(framework, last, tmp_path, capsys):
    run = RUNS[framework](raised(110, last))
    train(run, tmp_path)
    assert run.error() < 0.1
    (done,) = events(tmp_path, "rollback")
    assert (done["checkpoint"], done["by"]) == (100, "nonfinite_steps")
    assert done["lr_limit"] == pytest.approx(RATE), "the rate was above every healthy one"
    assert events(tmp_path, "end")[0]["ending"] == "completed"
    lines = capsys.readouterr().err
    assert "20 steps in a row had no finite gradient although the weights are finite" in lines


@pytest.mark.slow
def test_damage_that_does_not_come_back_costs_the_repeated_steps(tmp_path):
    """The run ends with the bits of an undamaged run."""
    undamaged, run = TorchRun(), TorchRun()
    train(undamaged, None)
    step = run.step

    def damaging_step(healer: Any, number: int) -> None:
        step(healer, number)
        if number == 110 and run.numbers.count(110) == 1:
            run.model.weight.data[0, 0] = 1e10

    run.step = damaging_step
    train(run, tmp_path)
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["checkpoint"], rollback["batches"]) == (100, [])
    assert run.weights() == undamaged.weights()


@BOTH_FRAMEWORKS
def test_bad_data_cost_repeated_steps_and_no_bits(framework, tmp_path):
    """60 bad batches: after three attempts the run is as if they had been left out."""
    bad = range(110, 170)
    skipping, run = RUNS[framework](), RUNS[framework](bad=bad)
    train(skipping, None, data=[number for number in range(STEPS) if number not in bad])
    counts = train(run, tmp_path)
    attempts = events(tmp_path, "rollback")
    assert counts["rollbacks"] == len(attempts)
    assert [each["checkpoint"] for each in attempts] == [100, 75, 75]
    assert {each["lr_scale"] for each in attempts} == {1.0}
    assert attempts[1]["held"]
    assert "held" not in attempts[2], "the frozen steps are undone"
    assert run.weights() == skipping.weights()


@pytest.mark.slow
def test_a_run_that_dies_at_a_healthy_rate_is_tried_at_a_lower_one(tmp_path):
    """A sign error in 40 gradients, with momentum and batch statistics: it dies later."""
    torch.manual_seed(0)
    first = torch.nn.Linear(12, 48), torch.nn.BatchNorm1d(48), torch.nn.GELU()
    second = torch.nn.Linear(48, 48), torch.nn.LayerNorm(48), torch.nn.Tanh()
    model = torch.nn.Sequential(*first, *second, torch.nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    state = {"model": model, "optimizer": optimizer}
    losses: list[float] = []
    with Healer(state=state, store=tmp_path, checkpoints=Checkpoints(every=50)) as healer:
        for number in healer.batches(range(400)):
            random = torch.Generator().manual_seed(number)
            inputs = torch.randn(32, 12, generator=random)
            loss = (model(inputs)[:, 0] - inputs.sum(1).sin()).square().mean()
            losses.append(loss.item())
            healer.observe(loss)
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - healer.step / 400)
            optimizer.zero_grad()
            loss.backward()
            if 220 <= healer.step < 260:
                for each in model.parameters():
                    if each.grad is not None:
                        each.grad.neg_()
            optimizer.step()
    assert max(losses[-20:]) < 10, "1e36 where its own way is accepted"


@pytest.mark.slow
def test_a_later_bad_shard_is_only_skipped(tmp_path):
    """The first shard has shown that the data are bad, so that the second costs nothing."""
    run = TorchRun(bad={*range(110, 170), *range(180, 220)})
    assert train(run, tmp_path)["rollbacks"] == 3
    assert run.error() < 0.1


@pytest.mark.slow
def test_after_three_attempts_the_run_ends_with_the_diagnosis(tmp_path):
    """Nothing that healcore changes brings this run back."""
    run = TorchRun(bad=range(110, 3000))
    with pytest.raises(RunStopped, match="none of the last 1,000 steps was finite") as stop:
        train(run, tmp_path, 3000)
    assert "the loss is NaN or Inf" in stop.value.why
    assert [each["checkpoint"] for each in events(tmp_path, "rollback")] == [100, 75, 75]
    assert events(tmp_path, "rollback")[-1]["step"] < 200


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [(1, 111), (1, 125), (2, 125)])
def test_a_run_that_is_killed_in_between_is_brought_back_too(killed_at, tmp_path):
    """Killed at the given visit of a batch: before, in and after the attempt."""
    visit, killed = killed_at
    run = TorchRun(raised(110, STEPS))
    step = run.step

    def killed_step(healer: Any, number: int) -> None:
        if number == killed and run.numbers.count(number) == visit - 1:
            raise KeyboardInterrupt
        step(healer, number)

    run.step = killed_step
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path)
    new_process()
    run = TorchRun(raised(110, STEPS))
    train(run, tmp_path)
    assert run.error() < 0.1
    assert len(events(tmp_path, "rollback")) == 1


@pytest.mark.slow
def test_data_that_cannot_be_repeated_are_left_until_the_run_would_end(tmp_path):
    """A rollback after 20 bad batches of a generator would lose trained steps for nothing."""
    run = TorchRun(bad=range(110, 170))
    assert train(run, tmp_path, data=(number for number in range(STEPS)))["rollbacks"] == 0
    assert run.error() < 0.1
    ruined = TorchRun(raised(110, 129))
    train(ruined, tmp_path / "ruined", data=(number for number in range(1300)))
    (done,) = events(tmp_path / "ruined", "rollback")
    assert done["step"] > IN_A_ROW
    assert ruined.error() < 0.1


def test_a_policy_that_observes_changes_nothing(tmp_path):
    run = TorchRun(raised(110, 129))
    observing = policies.load("default", mode="observe")
    assert train(run, tmp_path, policy=observing)["rollbacks"] == 0
