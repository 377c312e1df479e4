"""A torch problem as a JAX program: its data, initial weights, optimizer and metric, taken over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench import problem as torch_side
from benchmarks.healbench.jax_tasks.models import Arrays
from benchmarks.healbench.problem import MAIN, Task
from benchmarks.healbench.tasks import TASKS

Loss = Callable[[Arrays, Any], tuple[jax.Array, Arrays]]
"""Takes parameters and a batch; returns the loss and the batch's BatchNorm statistics, if any."""

Gradients = Callable[[Arrays, Any], Arrays]
"""Takes the gradients of a step and its batch; returns the gradients for the optimizer."""

_MOMENTUM = 0.1  # of BatchNorm's running statistics, torch's default


class State(NamedTuple):
    """The state that a training step takes and returns, and that a checkpoint holds."""

    params: Arrays
    """Parameters by their torch names."""
    opt_state: Any
    stats: Arrays
    """Running statistics of BatchNorm, by the torch names."""


class Damage(NamedTuple):
    """A fault, or the program's own edit, that changes the state between two steps."""

    before: int
    """Which iteration of the loop comes right after it, counted as executed."""
    change: Callable[[State], State]
    every: int = 0
    """Iterations until it comes again; 0: it does not."""

    def due(self, step: int) -> bool:
        """Whether it comes before this iteration."""
        late = step - self.before
        return late == 0 or (late > 0 and self.every > 0 and late % self.every == 0)


@dataclass
class Problem:
    """Model, data and optimizer of one run."""

    source: torch_side.Problem
    """The torch problem. It evaluates, and is never trained."""
    loss: Loss
    optimizer: optax.GradientTransformation
    batches: Sequence[Any]
    """One entry per step, of NumPy arrays."""
    params: Arrays
    stats: Arrays
    damage: Damage | None = None
    gradients: Gradients | None = None
    """The program's own change of the gradients, such as a clip; part of the compiled step."""
    final: State | None = None
    """Set by the arm at the end of the training."""

    def set_numbers(self, state: State, batch: Any) -> State:
        """Before a step: the optimizer's numbers as the program sets them, if the program does."""
        if self.source.numbers is None:
            return state
        numbers = _optax_names(self.source.numbers(batch[0]))
        return state._replace(opt_state=with_numbers(state.opt_state, numbers))

    def start(self, tx: optax.GradientTransformation) -> State:
        """The state before the first step, with the optimizer that the arm has made of its own."""
        return State(self.params, tx.init(self.params), self.stats)

    def evaluate(self) -> float:
        """The torch problem's metric of the final state."""
        assert self.final is not None, "train first"
        arrays = {**self.final.params, **self.final.stats}
        weights = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        # What is not there is BatchNorm's count of batches, which nothing reads.
        self.source.modules["model"].load_state_dict(weights, strict=False)
        return self.source.evaluate()


class Batches(Sequence[Any]):
    """A torch problem's batches as NumPy arrays, each converted when it is asked for.

    Args:
        source: the batches.
    """

    def __init__(self, source: Sequence[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, i: int) -> Any: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[Any]: ...

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        return jax.tree.map(_as_numpy, self.source[i])


def task(
    name: str,
    loss: Loss,
    *,
    damage: Damage | None = None,
    gradients: Gradients | None = None,
    quick: bool = False,
) -> Task:
    """The torch task of this name with another `build`.

    Args:
        name: of both. The torch problem has one optimizer, `main`, and one module, `model`.
        loss: the same loss of the same parameters by name.
        damage: what the torch task does to weights or optimizer, if it does.
        gradients: what the torch task does to its gradients, if it does.
        quick: part of `--quick`.
    """
    build: Any = partial(_build, TASKS[name].build, loss, damage, gradients)
    return dataclasses.replace(TASKS[name], build=build, quick=quick)


def _build(
    build: Callable[[int], torch_side.Problem],
    loss: Loss,
    damage: Damage | None,
    gradients: Gradients | None,
    seed: int,
) -> Problem:
    source = build(seed)
    model = source.modules["model"]
    return Problem(
        source=source,
        loss=loss,
        optimizer=_optimizer(source),
        batches=Batches(source.batches),
        params={name: _as_jax(weight) for name, weight in model.named_parameters()},
        stats={
            name: _as_jax(buffer)
            for name, buffer in model.named_buffers()
            if name.endswith(("running_mean", "running_var"))
        },
        damage=damage,
        gradients=gradients,
    )


def running(stats: Arrays, seen: Arrays) -> Arrays:
    """Running statistics after a batch with the statistics `seen`."""
    return {name: old + _MOMENTUM * (seen[name] - old) for name, old in stats.items()}


def with_numbers(opt_state: Any, numbers: dict[str, float]) -> Any:
    """The state of an optimizer with other numbers in that of `optax.inject_hyperparams`.

    Args:
        opt_state: of an optimizer that may be wrapped in others.
        numbers: by the names of optax, such as "b2".
    """

    def injected(node: Any) -> bool:
        return isinstance(node, optax.InjectStatefulHyperparamsState)

    def change(node: Any) -> Any:
        if not injected(node):
            return node
        old = node.hyperparams
        new = {name: jnp.asarray(value, old[name].dtype) for name, value in numbers.items()}
        return node._replace(hyperparams={**old, **new})

    return jax.tree.map(change, opt_state, is_leaf=injected)


def _optax_names(numbers: dict[str, Any]) -> dict[str, float]:
    """Numbers of a torch optimizer by the names of optax."""
    others = {name: value for name, value in numbers.items() if name != "betas"}
    betas = dict(zip(("b1", "b2"), numbers["betas"], strict=True)) if "betas" in numbers else {}
    return {**others, **betas}


def _sgd(learning_rate: Any, momentum: Any, weight_decay: Any) -> optax.GradientTransformation:
    """SGD with weight decay as in torch, where the decay is part of the gradient."""
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(decay, optax.sgd(learning_rate, momentum))


def _optimizer(source: torch_side.Problem) -> optax.GradientTransformation:
    """The optax optimizer with the numbers of the torch one.

    A rate that follows a schedule is put into the state by `optax.inject_hyperparams`, where
    healcore finds it.
    """
    torch_optimizer = source.optimizers[MAIN]
    (group,) = torch_optimizer.param_groups
    options: dict[str, Any]
    match torch_optimizer:
        case torch.optim.AdamW():  # a subclass of Adam
            make, options = optax.adamw, {"weight_decay": group["weight_decay"]}
        case torch.optim.Adam():
            make, options = optax.adam, {}
        case torch.optim.SGD() if group["weight_decay"]:
            make = _sgd
            options = {name: group[name] for name in ("momentum", "weight_decay")}
        case torch.optim.SGD():
            make, options = optax.sgd, {"momentum": group["momentum"] or None}
        case _:
            raise TypeError(f"no optax optimizer for {type(torch_optimizer).__name__}")
    if "betas" in group:
        options.update(zip(("b1", "b2"), group["betas"], strict=True), eps=group["eps"])
    scheduler = source.schedulers.get(MAIN)
    if scheduler is None:
        return make(group["lr"], **options)
    assert isinstance(scheduler, LambdaLR)
    factor = scheduler.lr_lambdas[0]
    rates = [scheduler.base_lrs[0] * factor(step) for step in range(len(source.batches))]
    table = jnp.asarray(rates, jnp.float32)
    return optax.inject_hyperparams(make)(learning_rate=lambda count: table[count], **options)


def _as_jax(tensor: torch.Tensor) -> jax.Array:
    return jnp.array(tensor.detach().numpy())  # a copy: torch may write to its own


def _as_numpy(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf
