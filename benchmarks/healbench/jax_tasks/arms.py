"""The arms of a JAX run: those of the torch side that differ only in the optimizer.

An arm wraps the program's optax optimizer; the Healer's has another loop as well. What is counted
leaves each step as a small output and is read at the end, so that no step waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import healcore
from benchmarks.healbench.arms.common import silent
from benchmarks.healbench.jax_tasks.models import Arrays
from benchmarks.healbench.jax_tasks.problem import Problem, State, running
from benchmarks.healbench.training import Run
from healcore.core.decision import Cause
from healcore.jax import commit, last_decision, metrics, protect

_NONFINITE = Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD


class Training(Run):
    """A run in JAX.

    The base class is the arm `nothing`. Others override `wrap`, `record`, `keep`, `loop` or
    `count`.
    """

    problem: Problem

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.tx = optax.with_extra_args_support(self.wrap(problem.optimizer))
        self._step = jax.jit(self._take)
        self._records: list[Any] = []

    def train(self) -> None:
        """The loop, to the end of the data or until the arm stops it."""
        self.problem.final = state = self.loop(self.problem.start(self.tx))
        self.count(jax.device_get(self._records), state.opt_state)

    def weights(self) -> Iterator[bytes]:
        """The parameters and BatchNorm statistics at the end."""
        assert self.problem.final is not None
        for leaf in jax.tree.leaves((self.problem.final.params, self.problem.final.stats)):
            yield np.asarray(leaf).tobytes()

    def step(self, state: State, batch: Any) -> State:
        """One iteration; the problem's damage comes before it, if this is when it does."""
        damage = self.problem.damage
        if damage is not None and damage.due(self.steps):
            state = damage.change(state)
        state = self.problem.set_numbers(state, batch)
        state, record = self._step(state, batch)
        self._records.append(record)
        self.steps += 1
        return state

    def _take(self, state: State, batch: Any) -> tuple[State, Any]:
        gradient = jax.value_and_grad(self.problem.loss, has_aux=True)
        (loss, seen), grads = gradient(state.params, batch)
        if self.problem.gradients is not None:
            grads = self.problem.gradients(grads, batch)
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params, value=loss)
        params: Any = optax.apply_updates(state.params, updates)
        stats = self.keep(opt_state, state.stats, running(state.stats, seen))
        return State(params, opt_state, stats), self.record(grads, opt_state)

    # -- what arms override ---------------------------------------------------------------------

    def wrap(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """The optimizer that the run is trained with."""
        return optimizer

    def record(self, grads: Arrays, opt_state: Any) -> Any:
        """Within the compiled step: the values that `count` needs."""

    def keep(self, opt_state: Any, old: Arrays, new: Arrays) -> Arrays:
        """Within the compiled step: the BatchNorm statistics to continue with."""
        return new

    def loop(self, state: State) -> State:
        """Every batch in order; returns the state at the end."""
        for batch in self.problem.batches:
            state = self.step(state, batch)
        return state

    def count(self, records: list[Any], opt_state: Any) -> None:
        """Fills in `counts`.

        Args:
            records: of each step, what `record` has returned.
            opt_state: at the end.
        """


class Attached(Training):
    """`protect(optimizer, policy)` with the loss as `value`.

    Args:
        problem: the program.
        policy: a preset's name, or whatever else `protect` takes.
    """

    def __init__(self, problem: Problem, policy: Any) -> None:
        self._policy = policy
        super().__init__(problem)

    def wrap(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """The protected optimizer."""
        return protect(optimizer, self._policy)

    def record(self, grads: Arrays, opt_state: Any) -> Any:
        """Whether the step was skipped, and what was wrong."""
        decision = last_decision(opt_state)
        return decision.skip, decision.cause

    def keep(self, opt_state: Any, old: Arrays, new: Arrays) -> Arrays:
        """A skipped step leaves no statistics behind."""
        return commit(last_decision(opt_state).skip, old, new)

    def count(self, records: list[Any], opt_state: Any) -> None:
        """Skipped steps, undone ones included, and what the healing state has counted itself."""
        nonfinite = [bool(int(cause) & _NONFINITE) for skip, cause in records if skip]
        self.counts.nonfinite_skips = sum(nonfinite)
        self.counts.finite_skips = len(nonfinite) - sum(nonfinite)
        numbers = metrics(opt_state)
        self.counts.clips = int(numbers["heal/clips"])
        self.counts.lr_cuts = int(numbers["heal/lr_cuts"])
        self.counts.lr_scale = float(numbers["heal/lr_scale"])


class Healed(Attached):
    """The same optimizer in the Healer's loop; checkpoints stay in host memory (`store=None`).

    Args:
        problem: the program.
        policy: a preset's name, or whatever else `Healer` takes.
        ask: pass the program's loss on as `loss_fn`.
    """

    def __init__(self, problem: Problem, policy: Any = "default", *, ask: bool = False) -> None:
        super().__init__(problem, policy)
        self._ask = ask

    def loop(self, state: State) -> State:
        """Through the Healer, which goes back in the batches."""
        loss = jax.jit(lambda state, batch: self.problem.loss(state.params, batch)[0])
        options: dict[str, Any] = {"loss_fn": loss} if self._ask else {}
        healer = healcore.Healer(self._policy, state=state, store=None, **options)
        with silent("healcore"):
            try:
                with healer:
                    for batch in healer.batches(self.problem.batches):
                        healer.update(self.step(healer.state, batch))
            except healcore.RunStopped as error:
                self.counts.stopped = error.why
        self.counts.rollbacks = healer.rollbacks
        return healer.state


ARMS: dict[str, Callable[[Problem], Training]] = {
    "nothing": Training,
    "attach_default": functools.partial(Attached, policy="default"),
    "healer": Healed,
    "healer_ask": functools.partial(Healed, ask=True),
}
"""An arm of a problem, by the names of the torch side, in the order of the table."""
