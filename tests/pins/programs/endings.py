"""A program that ends in a given way.

    python -m tests.pins.programs.endings FOLDER FRAMEWORK ENDING

It trains 20 batches, and the ending comes at batch 7. Prints what it has raised and its report.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from healcore import Checkpoints, HealcoreError, Healer
from healcore import policy as policies

BATCHES, AT = 20, 7
CHECKPOINTS = Checkpoints(every=5)
"""A `save` at each 5 steps."""
POLICY = policies.load("default", rollback={"probation": 4}, incident={"quiet_steps": 2})
STOPS = policies.load(POLICY, respond=[{"to": ["nonfinite"], "do": ["skip", "stop"]}])
SMALL = policies.load(POLICY, respond=[{"to": ["oom"], "do": ["shrink_microbatch"]}])
OUT_OF_MEMORY = {"out of memory once": 1, "out of memory twice": 2}
"""How many of the parts of batch 7 do not fit into memory. A batch has two samples."""


def batch(number: int, *, bad: bool = False) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    inputs = random.normal(size=(2, 4)).astype(np.float32)
    targets = np.tanh(inputs.sum(1, keepdims=True))
    return inputs, targets * np.float32("nan") if bad else targets


class TorchLoop:
    """A linear model in torch."""

    def __init__(self, policy: Any, first: float) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(self.model.weight, first)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, healer: Any, numbers: tuple[np.ndarray, np.ndarray], oom: int) -> None:
        inputs, targets = map(self.torch.from_numpy, numbers)
        for part in healer.microbatches((inputs, targets)):
            with part:
                if oom:
                    oom -= 1
                    raise self.torch.OutOfMemoryError("out of memory")
                loss = (self.model(part.batch[0]) - part.batch[1]).square().mean()
                healer.observe(loss)
                (loss * part.weight).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def damage(self, healer: Any) -> None:
        self.model.weight.data.fill_(float("nan"))


class JaxLoop:
    """A linear model in JAX."""

    def __init__(self, policy: Any, first: float) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import healcore.jax

        tx = healcore.jax.protect(optax.adamw(1e-2), policy)
        params = {"w": jnp.full((4, 1), first)}
        self.state = {"params": params, "opt_state": tx.init(params)}

        def loss_of(params: Any, inputs: Any, targets: Any) -> Any:
            return jnp.mean((inputs @ params["w"] - targets) ** 2)

        def step(state: Any, inputs: Any, targets: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(state["params"], inputs, targets)
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
            return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

        self.compiled = jax.jit(step)

    def step(self, healer: Any, numbers: tuple[np.ndarray, np.ndarray], oom: int) -> None:
        for part in healer.microbatches(numbers):
            with part:
                if oom:
                    oom -= 1
                    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1000 bytes.")
                healer.update(self.compiled(healer.state, *part.batch))

    def damage(self, healer: Any) -> None:
        params = {"w": healer.state["params"]["w"] * np.nan}
        healer.update({**healer.state, "params": params})


def act(ending: str, folder: Path, number: int) -> None:
    """What ends the program at batch 7, from outside or by itself."""
    if number != AT:
        return
    if ending == "stop file":
        (folder / "STOP").touch()
        time.sleep(3.0)  # healcore looks for the file once a second
    if ending == "exception":
        raise ValueError("wrong")
    if ending == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if ending == "out of memory without parts":
        raise MemoryError("out of memory")
    if ending == "exit":
        sys.exit(3)
    if ending in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, ending))


def train(folder: Path, framework: str, ending: str) -> None:
    policy = {"policy stop": STOPS, "out of memory twice": SMALL}.get(ending, POLICY)
    first = 0.25 if ending == "other weights" else 0.5
    loop: Any = (TorchLoop if framework == "torch" else JaxLoop)(policy, first)
    count = 0 if ending == "empty" else BATCHES
    batches: Any = range(count)
    if ending == "end of a generator":
        batches = (number for number in range(count))
    healer = Healer(
        policy,
        state=loop.state,
        store=folder / "store",
        checkpoints=CHECKPOINTS,
        stop_file=folder / "STOP",
    )
    try:
        with healer:
            for number in healer.batches(batches):
                if number >= AT:
                    act(ending, folder, number)
                bad = ending == "policy stop" or ending == "only NaN"
                oom = OUT_OF_MEMORY.get(ending, 0) if number == AT else 0
                if ending == "no step":
                    continue
                loop.step(healer, batch(number, bad=bad and number >= AT), oom)
                if ending == "weights become NaN" and number >= AT:
                    loop.damage(healer)
                if ending == "break" and number == AT:
                    break
            print("after the loop")
        print("after the block")
    except BaseException as error:
        names = [each.__name__ for each in type(error).__mro__]
        is_ours = isinstance(error, HealcoreError)
        print("raised", names[0], "(SystemExit)" if "SystemExit" in names and is_ours else "")
        raise
    finally:
        try:
            report = healer.report()
        except HealcoreError as error:
            print("no report:", type(error).__name__)
        else:
            print(f"report: {report.ending} at {report.steps}, converged {report.converged}")


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
