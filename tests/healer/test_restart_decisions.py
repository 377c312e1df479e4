"""A run that is killed at any step heals its fault as the same run that is never killed.

After NaN it decides the same. Where weights are compared, it may decide some steps later.

This file is a program too: python -m tests.healer.test_restart_decisions FRAMEWORK FAULT ROOT STEP
... Prints one line of JSON with what was different, for each step at which the run is killed.
"""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore import Checkpoints, Healer, Logging
from healcore import policy as policies
from healcore.events import read
from healcore.jax import protect
from healcore.runtime.run.rollback import recovery
from tests import forked_programs
from tests.healer.killed_runs import NAME, die, digest, forked

BATCHES = 130
IN_REPORT = -2
"""In place of a number of steps: kills after the commit of the first rollback, before its event."""
POLICY = policies.load("default", rollback={"probation": 10})
FAULTS = {"nan before": 50, "nan after": 49, "rate": 90}
"""Kind of a fault -> the batch at which it begins."""
MAX_RATIO = 1.02
"""Loss of a run that is killed in a trouble, by the loss of the run that is not killed."""
CHANGES = ("alarm", "over", "rollback", "assessment")
"""Kinds of events about decisions. A step that is repeated after a kill has its events twice."""


def data(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    inputs = random.normal(size=(16, 4)).astype(np.float32)
    noise = random.normal(size=(16, 1)).astype(np.float32)
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True)) + np.float32(0.3) * noise


def rate_factor(fault: str, number: int) -> float:
    """Factor on the learning rate of a batch."""
    return 300.0 if fault == "rate" and 90 <= number < 96 else 1.0


def torch_run(fault: str, store: Path, kill_at: int) -> list[Any]:
    torch.manual_seed(0)
    first = torch.nn.Linear(4, 16)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square().mean()

    def read_batch(number: int) -> Any:
        inputs, targets = data(number)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    compares = fault == "rate"
    with Healer(
        POLICY,
        state={"model": model, "optimizer": optimizer},
        loss_fn=loss_of if compares else None,
        store=store,
        checkpoints=Checkpoints(every=10),
        logging=Logging(console=False),
    ) as healer:
        for passed, number in enumerate(healer.batches(range(BATCHES))):
            if passed == kill_at:
                die()
            if fault == "nan before" and number == FAULTS[fault]:
                first.weight.data.fill_(np.nan)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * rate_factor(fault, number)
            batch = read_batch(number)
            loss = healer.loss(batch) if compares else loss_of(batch)
            if not compares:
                healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "nan after" and number == FAULTS[fault]:
                first.weight.data.fill_(np.nan)
    return [each.detach().numpy() for each in model.parameters()]


def jax_run(fault: str, store: Path, kill_at: int) -> list[Any]:
    # The rate is a leaf of the state, so that the program can raise it between two steps.
    tx = protect(optax.inject_hyperparams(optax.adamw)(learning_rate=3e-3), policy=POLICY)
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(first, (4, 16)) / 2,
        "b1": jnp.zeros(16),
        "w2": jax.random.normal(second, (16, 1)) / 4,
    }

    def loss_of(state: Any, batch: Any) -> jax.Array:
        inputs, targets = batch
        weights = state["params"]
        hidden = jnp.tanh(inputs @ weights["w1"] + weights["b1"])
        return jnp.mean((hidden @ weights["w2"] - targets) ** 2)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        def of_params(params: Any) -> jax.Array:
            return loss_of({"params": params}, batch)

        loss, grads = jax.value_and_grad(of_params)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"], value=loss)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    def spoilt(state: Any) -> Any:
        return {**state, "params": {**state["params"], "b1": jnp.full(16, jnp.nan)}}

    with Healer(
        POLICY,
        state={"params": params, "opt": tx.init(params)},
        loss_fn=loss_of if fault == "rate" else None,
        store=store,
        checkpoints=Checkpoints(every=10),
        logging=Logging(console=False),
    ) as healer:
        for passed, number in enumerate(healer.batches(range(BATCHES))):
            if passed == kill_at:
                die()
            state = healer.state
            batch = data(number)
            if fault == "nan before" and number == FAULTS[fault]:
                state = spoilt(state)
            state = with_rate(state, 3e-3 * rate_factor(fault, number))
            state = step(state, batch)
            if fault == "nan after" and number == FAULTS[fault]:
                state = spoilt(state)
            healer.update(state, batch=batch)
        state = healer.state
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state["params"])]


def with_rate(state: Any, rate: float) -> Any:
    """The state with another learning rate in `optax.inject_hyperparams`."""
    opt = optax.tree_utils.tree_set(state["opt"], learning_rate=jnp.float32(rate))
    return {**state, "opt": opt}


RUNS = {"torch": torch_run, "jax": jax_run}


def events_of(store: Path) -> set[str]:
    """The events about decisions, without what every process has of its own."""
    own = ("seq", "run", "time", "mono")
    found = [each for each in read(store / NAME).events if each["kind"] in CHANGES]
    return {json.dumps({n: v for n, v in each.items() if n not in own}) for each in found}


def start(framework: str, fault: str, root: Path, kill_at: int) -> None:
    if kill_at == IN_REPORT:
        recovery.reports.report_rollback = lambda *_: die()
    weights = RUNS[framework](fault, root / "store", kill_at)
    end = {"bits": digest(*weights), "loss": loss_of(framework, weights)}
    (root / "end").write_text(json.dumps(end))


def loss_of(framework: str, weights: list[Any]) -> float:
    """Mean loss of the trained weights over all batches."""
    if framework == "torch":
        w1, b1, w2, b2 = weights
        w1, w2 = w1.T, w2.T
    else:
        b1, w1, w2 = weights
        b2 = 0.0
    losses = []
    for inputs, targets in map(data, range(BATCHES)):
        losses.append(np.square(np.tanh(inputs @ w1 + b1) @ w2 + b2 - targets).mean())
    return float(np.mean(losses))


def run_to_end(framework: str, fault: str, root: Path, kill_at: int) -> None:
    """A run that is killed once after so many steps, and started again; or never with -1."""
    root.mkdir(parents=True)
    for at in dict.fromkeys((kill_at, -1)):
        child = forked(partial(start, framework, fault, root, at), root / "errors")
        _, status = os.waitpid(child, 0)
        if status == 0:
            assert at != IN_REPORT, "the rollback was reported without a kill"
            return
        assert at != -1, (root / "errors").read_text()


def difference(fault: str, root: Path, clean: Path) -> dict[str, Any]:
    """What the killed run has done worse or differently; empty if nothing."""
    mine, theirs = events_of(root / "store"), events_of(clean / "store")
    ends = [json.loads((each / "end").read_text()) for each in (root, clean)]
    found: dict[str, Any] = {}
    if fault == "rate":
        ratio = ends[0]["loss"] / ends[1]["loss"]
        if not ratio <= MAX_RATIO:
            found["ratio"] = ratio
        return found
    if ends[0] != ends[1]:
        found["bits"] = "differ"
    if missing := sorted(theirs - mine):
        found["missing"] = missing
    if more := sorted(mine - theirs):
        found["more"] = more
    return found


def main(framework: str, fault: str, root: Path, kills: list[int]) -> None:
    for name in (f"healcore.{framework}.driver", f"healcore.{framework}.store", "torch._dynamo"):
        importlib.import_module(name)  # otherwise every start would do it
    if framework == "jax":
        # Filled by the run that is not killed: the others compile nothing.
        jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    run_to_end(framework, fault, root / "clean", -1)
    assert events_of(root / "clean" / "store")
    for kill_at in kills:
        run_to_end(framework, fault, root / f"{kill_at}", kill_at)
        found = difference(fault, root / f"{kill_at}", root / "clean")
        print(json.dumps({"steps before the kill": kill_at, **found}), flush=True)


def differences(framework: str, fault: str, root: Path, kills: list[int]) -> list[Any]:
    """The lines of the program about runs that decide differently."""
    program = "-m", "tests.healer.test_restart_decisions", framework, fault, root, *kills
    done = forked_programs.run(*program)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(kills)
    return [each for each in found if len(each) > 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kills"),
    [
        ("nan before", [*range(41, 76, 5), IN_REPORT]),
        ("nan after", range(41, 76, 5)),
        ("rate", range(5, 150, 5)),
    ],
)
@pytest.mark.parametrize("framework", RUNS)
def test_a_killed_run_heals_a_fault_as_one_that_is_not_killed(framework, fault, kills, tmp_path):
    assert differences(framework, fault, tmp_path, [*kills]) == []


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(each) for each in sys.argv[4:]])
