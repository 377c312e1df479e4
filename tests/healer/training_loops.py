"""The same small training loop in both frameworks, with faults where a test wants them.

Batches are numbers; what is in one follows from its number. So any list, generator or data loader
of numbers is a data set, and a test can choose which batches are bad, always or only once.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, overload

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore import Checkpoints, Healer
from healcore import policy as policies
from healcore.jax import protect
from healcore.jax.opt_state import without_heal_state
from healcore.policy import Policy, PolicyLike
from healcore.torch import Healing
from tests.healer.run_options import grouped

JAX = pytest.param("jax", marks=pytest.mark.slow)
"""JAX as a parameter of a test that `make test` runs in torch: compiling takes most of its time."""

BOTH_FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", JAX])

EVERY_5 = Checkpoints(every=5)

SKIPS = policies.loads(
    'schema = 1\nname = "skips"\n[detect.nonfinite]\n[[respond]]\nto = ["nonfinite"]\n'
    'do = ["skip", "alert"]\n[incident]\nquiet_steps = 20\n[rollback]\nprobation = 4\n'
)
"""A policy that skips bad batches and does nothing else."""


def rules(
    *,
    cut: bool = True,
    skip_batches: int = 0,
    recoveries: int = 3,
    mode: Literal["heal", "observe"] = "heal",
) -> Policy:
    """A policy that rolls back, and cuts the rate, at the first bad batch."""
    do = ["skip", "rollback", "cut_lr"] if cut else ["skip", "rollback"]
    return policies.load(
        SKIPS,
        name="test",
        mode=mode,
        respond=[{"to": ["nonfinite"], "do": do}],
        incident={"quiet_steps": 2, "patience": 5},
        rollback={"region": 30, "skip_batches": skip_batches},
        lr={"hold_steps": 3, "ramp_steps": 4},
        budget={"recoveries": recoveries, "refund_after": 10000},
    )


ANSWERS = [
    {"to": ["data"], "do": ["skip_batch"]},
    {"to": ["network"], "do": ["retry"]},
    {"to": ["unknown"], "do": ["save"]},
]


def with_answers(**more: Any) -> Policy:
    """The policy of `rules`, which also answers faults."""
    policy = rules()
    respond = policies.to_dict(policy)["respond"]
    return policies.load(policy, respond=[*respond, *ANSWERS], **more)


class Faults:
    """Which batches are bad: their targets are NaN each time, or the first time only."""

    def __init__(self, always: Iterable[int] = (), once: Iterable[int] = ()) -> None:
        self.always: Set[int] = frozenset(always)
        self.once: Set[int] = frozenset(once)
        self.seen: Counter[int] = Counter()
        self.order: list[int] = []

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        self.seen[number] += 1
        self.order.append(number)
        random = np.random.default_rng(number)
        inputs = random.normal(size=(16, 4)).astype(np.float32)
        targets = np.sin(inputs.sum(axis=1, keepdims=True))
        if number in self.always or (number in self.once and self.seen[number] == 1):
            targets = targets * np.float32("nan")
        return inputs, targets


class Loop(Protocol):
    """What `TorchLoop` and `JaxLoop` have in common."""

    framework: str
    """"torch" or "jax"."""
    faults: Faults
    """Makes the batches, and has the numbers of all batches so far."""
    state: dict[str, Any]
    """The state for a Healer."""

    def step(self, healer: Healer | None, number: int) -> None:
        """Trains with the batch of a number: within the Healer, or without one."""
        ...

    def weights(self) -> list[np.ndarray]:
        """Copies of all arrays that a step changes: parameters and moments."""
        ...


class TorchLoop:
    """Dropout, AdamW, a cosine schedule: everything that a rollback must restore."""

    framework = "torch"
    rate = 1e-2

    def __init__(self, faults: Faults | None = None) -> None:
        torch.manual_seed(0)
        self.faults = faults or Faults()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.model = torch.nn.Sequential(
            self.first, torch.nn.Dropout(0.2), torch.nn.Tanh(), self.last
        )
        self.optimizer: torch.optim.Optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate)
        self.scheduler: torch.optim.lr_scheduler.LRScheduler
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def step(self, healer: Healer | Healing | None, number: float) -> None:
        inputs, targets = map(torch.from_numpy, self.faults.batch(int(number)))
        loss = (self.model(inputs) * (1 + number % 1) - targets).square().mean()
        if healer is not None:
            healer.observe(loss)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[np.ndarray]:
        states = self.optimizer.state.values()
        moments = [each[name] for each in states for name in ("exp_avg", "exp_avg_sq")]
        tensors = [*self.model.parameters(), *moments]
        return [tensor.detach().numpy().copy() for tensor in tensors]


@cache
def protected_step(policy: PolicyLike | None) -> tuple[Any, Any]:
    """The transformation and the step of `JaxLoop`: compiled once for all loops with one policy."""
    adamw = optax.adamw(optax.cosine_decay_schedule(1e-2, 200))
    tx = adamw if policy is None else protect(adamw, policy=policy)

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        key, drop = jax.random.split(jax.random.wrap_key_data(state["key"]))

        def loss_of(params: Mapping[str, jax.Array]) -> jax.Array:
            hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
            hidden = hidden * jax.random.bernoulli(drop, 0.8, hidden.shape) / 0.8
            return jnp.mean((hidden @ params["w2"] + params["b2"] - targets) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = optax.with_extra_args_support(tx).update(
            grads, state["opt_state"], state["params"], value=loss
        )
        params = optax.apply_updates(state["params"], updates)
        key_data = jax.random.key_data(key)
        return {**state, "params": params, "opt_state": opt_state, "key": key_data}

    return tx, jax.jit(step, donate_argnums=0)


class JaxLoop:
    """The same with optax; the dropout's key is part of the state."""

    framework = "jax"

    def __init__(self, faults: Faults | None = None, policy: PolicyLike | None = None) -> None:
        self.faults = faults or Faults()
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "w1": jax.random.normal(keys[0], (4, 8)) / 2,
            "b1": jnp.zeros(8),
            "w2": jax.random.normal(keys[1], (8, 1)) / 3,
            "b2": jnp.zeros(1),
        }
        self.tx, self.compiled_step = protected_step(policy)
        self.state: dict[str, Any] = {
            "params": params,
            "opt_state": self.tx.init(params),
            "key": jax.random.key_data(keys[2]),
        }

    def step(self, healer: Healer | None, number: int) -> None:
        batch = self.faults.batch(int(number))
        self.state = self.compiled_step(self.state if healer is None else healer.state, *batch)
        if healer is not None:
            healer.update(self.state)

    def weights(self) -> list[np.ndarray]:
        """Everything that a step changes, as NumPy arrays, without the healing state."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(without_heal_state(self.state))]


@overload
def loop_of(
    framework: Literal["torch"], faults: Faults | None = None, policy: PolicyLike | None = None
) -> TorchLoop: ...
@overload
def loop_of(
    framework: str, faults: Faults | None = None, policy: PolicyLike | None = None
) -> Loop: ...
def loop_of(framework: str, faults: Faults | None = None, policy: PolicyLike | None = None) -> Loop:
    """A fresh loop; the same weights each time.

    Args:
        framework: "torch" or "jax".
        faults: which batches are bad, by default none.
        policy: the policy of `train`. A step in JAX contains the policy, or is without healcore if
            it is None. A torch step does not read it.
    """
    if framework == "torch":
        return TorchLoop(faults)
    return JaxLoop(faults, policy)


@dataclass(frozen=True)
class TrainingResult:
    """What the Healer of `train` says at the end of its run."""

    step: int
    """Number of steps, without those that a rollback has undone."""
    rollbacks: int
    """Number of rollbacks."""
    last_good: int | None
    """Step of the newest known-good checkpoint, or None if there is none."""


def train(
    loop: Loop,
    policy: PolicyLike,
    data: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    before: Callable[[Healer, int], object] | None = None,
    epochs: int = 1,
    **options: Any,
) -> TrainingResult:
    """Trains within a Healer to the end of the data.

    Args:
        loop: the training. It has the final state afterwards.
        policy: the policy, see `Healer`.
        data: the numbers of the batches, or a function that makes an iterable of them.
        before: called with the Healer and the number of the batch before each step.
        epochs: number of passes over the data.
        **options: other options of a `Healer`, as `grouped` takes them: `store=tmp_path`. A
            checkpoint is saved every 5 steps unless `save_every` says otherwise.
    """
    options.setdefault("save_every", 5)
    with Healer(policy, state=loop.state, **grouped(options)) as healer:
        for number in healer.batches(data, epochs=epochs):
            if before is not None:
                before(healer, int(number))
            loop.step(healer, number)
        last_good = healer.report().last_good
        loop.state = healer.state
        return TrainingResult(healer.step, healer.rollbacks, last_good)


def at(batch: int, action: Callable[[Healer], object]) -> Callable[[Healer, int], None]:
    """A `before` that calls an action with the Healer at a batch."""

    def act(healer: Healer, number: int) -> None:
        if number == batch:
            action(healer)

    return act


def broken_at(
    batch: int, error: type[BaseException] = RuntimeError
) -> Callable[[Healer, int], None]:
    """A `before` that ends the run at a batch with an exception, whose text is `power`."""

    def fail(healer: Healer) -> None:
        raise error("power")

    return at(batch, fail)


def breaks_off(
    loop: Loop,
    policy: PolicyLike,
    data: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    at: int,
    **options: Any,
) -> None:
    """`train` up to a batch, at which the run ends with an exception."""
    with pytest.raises(RuntimeError, match="power"):
        train(loop, policy, data, before=broken_at(at), **options)


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Whether two states are equal, bit by bit."""
    return [(x.dtype, x.tobytes()) for x in a] == [(x.dtype, x.tobytes()) for x in b]
