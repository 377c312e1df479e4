"""What the `Healer` needs from a framework; each adapter has one driver.

A driver reads and replaces the live state and the engine states in it. It decides nothing: the
Healer chooses the checkpoint, keeps budgets and learning rate, and determines when to save.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from healcore import adapter_registry
from healcore.adapter_registry import FRAMEWORKS
from healcore.core.engine import Engine, StateError
from healcore.core.errors import HealcoreError
from healcore.core.step_record import StepRecord
from healcore.runtime.microbatches.window import Gradients
from healcore.runtime.store.protocol import CheckpointStore
from healcore.runtime.store.ranks import Ranks


class PendingDispatch(Protocol):
    """A step, or a compiled loop of many, whose records are being copied to the host."""

    count: int
    """Expected number of steps; the result of `steps` has the actual number."""
    vote_requested: bool
    """Whether a rank had asked for a vote before its last step (`Driver.request_vote`).

    The same on every rank; known once `steps` was called.
    """

    def steps(self) -> list[list[StepRecord]]:
        """The records of each step, oldest first. Waits if they have not arrived yet.

        A step has one record per engine, or more if an engine judged several times within it.
        """
        ...


class Generators(Protocol):
    """A framework's random generators."""

    def state_dict(self) -> dict[str, Any]:
        """Their present states, for `load_state_dict`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores saved states."""
        ...


def check_engines(engines: Iterable[str], present: Iterable[str]) -> None:
    """Raises StateError unless the run (`present`) has all of these engines."""
    known = list(present)
    for name in engines:
        if name not in known:
            raise StateError(
                f"there is no engine named {name!r} in this run, there is {', '.join(known)}: "
                "pass the healing state of a run with the same optimizers"
            )


class Driver(Protocol):
    """One framework's part of a healed run."""

    framework: str
    """`torch` or `jax`."""
    warnings: list[str]
    """Lines to log, oldest first; the run logs them and empties the list."""

    def items(self) -> dict[str, Any]:
        """The live state to save, without engines: name -> tree, or object with `state_dict`.

        Nothing is copied; the store does that.
        """
        ...

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Loads `Restored.state` of `items` into the live state, and zeroes accumulators.

        Accumulators are gradients that no step has used yet, also inside optax.MultiSteps.

        Raises:
            StateMismatch: the state does not fit; nothing was changed.
        """
        ...

    def reset_moments(self) -> None:
        """Sets the optimizers' moments and their bias correction back to the start of a run.

        Learning-rate schedules stay where they are. Only if `moments_obstacle` is empty.
        """
        ...

    def moments_obstacle(self) -> str:
        """Reason why the moments cannot be reset, or an empty string."""
        ...

    def healing(self) -> dict[str, dict[str, Any]]:
        """Engine name -> `Engine.to_dict` of its present state. Waits for the device."""
        ...

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the named engine states; the others stay.

        Raises:
            StateError: a state is of another policy; nothing was changed.
        """
        ...

    def poll_step(self) -> PendingDispatch | None:
        """The dispatch since the last call, or None. Starts its copy to the host."""
        ...

    def on_step(self, call: Callable[[], None]) -> None:
        """From now on calls `call` after each optimizer step, without waiting for the device."""
        ...

    def request_vote(self, wanted: bool) -> bool:
        """Marks the steps from now on for all ranks, or with False no longer.

        Returns whether it can. The mark is part of what the ranks exchange at each step anyway, and
        comes back as `PendingDispatch.vote_requested`. A signal handler calls this too.
        """
        ...

    def may_save(self) -> bool:
        """False within an accumulation: a checkpoint does not hold accumulated gradients."""
        ...

    def interrupted(self) -> bool:
        """Whether an exception has interrupted an update: the state may be half updated."""
        ...

    def undo_window(self) -> str:
        """Undoes what batches since the last step have changed.

        Returns the reason if it cannot, or an empty string. Called before a save after an exception
        within a step: the batches come again.
        """
        ...

    def finite(self) -> bool:
        """Whether all parameters are finite now. Waits for the device."""
        ...

    def copy_weights(self) -> Any:
        """A copy of the trainable parameters on the host, for `losses_of`.

        Each rank copies its shards of sharded parameters.
        """
        ...

    def losses_of(
        self, loss_fn: Callable[..., Any], batches: Iterable[Any], weights: Any = None
    ) -> list[float]:
        """The loss of each batch, in the mode of training and without gradients.

        Every call draws the random numbers that the next step will draw, so that two calls differ
        by the weights only. The run's state is unchanged afterwards.

        Args:
            loss_fn: takes the batch, preceded by the state if that is a value (JAX).
            batches: as the loop has received them.
            weights: from `copy_weights`, or None for the current weights. Buffers are not replaced.
        """
        ...

    def try_loss_fn(self, loss_fn: Callable[..., Any], batch: Any) -> Any:
        """What a loss function returns for a batch, on the host. The run's state is unchanged."""
        ...

    def gradient_window(self) -> Gradients:
        """The gradients since the last step, for batches that are done again in smaller parts."""
        ...

    def optimizer_reports(self) -> dict[str, object]:
        """How each optimizer is healed: name -> dataclass with lines as `str()`. Empty in JAX."""
        ...

    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters in the state: name -> number, text, bool, or a list of them.

        In torch the classes of optimizers and schedulers come first.
        A schedule's own changes do not count where its start value is known. Values that a
        scheduler was built with are included: a checkpoint restores them too.
        """
        ...

    def learning_rate(self) -> float | None:
        """The user's own learning rate now, without the multiplier, or None if unknown."""
        ...

    def expect_change(self) -> None:
        """Opens every engine's grace window."""
        ...

    def state_bytes(self) -> int:
        """Size of one copy of the state in this process, including moments not created yet."""
        ...

    def store(
        self, where: Any, nonfinite_ok: tuple[str, ...], *, trust: bool = False
    ) -> CheckpointStore:
        """The default store: memory, and the directory `where` if given; `trust` as in `Healer`."""
        ...

    def ranks(self) -> Ranks:
        """The processes of this run."""
        ...

    def generators(self) -> Generators | None:
        """The framework's global random generators, or None if the state holds its keys itself."""
        ...

    def close(self) -> None:
        """Removes the hooks that the driver has installed."""
        ...


def json_setting(value: Any) -> Any:
    """A hyperparameter as a JSON value, or None for a tensor, a function or another object."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, tuple | list):
        items = [json_setting(each) for each in value]
        return None if not items or None in items else items
    return None


class UnknownState(HealcoreError, TypeError):
    """A state that no driver supports; the message explains what to pass instead."""


def trainer_limit(state: Any) -> float | None:
    """Max gradient norm of the trainer that owns an optimizer of the state, or None."""
    parts = state.values() if isinstance(state, Mapping) else ()
    limits = [getattr(part, "trainer_limit", None) for part in parts if hasattr(part, "heal")]
    return min((limit for limit in limits if limit is not None), default=None)


def framework_of(state: Any) -> str:
    """The name of the framework; raises UnknownState if there is nothing of torch or JAX."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(state, Mapping):
        kinds = (torch.optim.Optimizer, torch.nn.Module)
        if any(isinstance(getattr(each, "optimizer", each), kinds) for each in state.values()):
            return "torch"
    if jax is not None:
        return "jax"
    raise UnknownState(
        f"state is a {type(state).__name__} with nothing of torch or JAX in it: pass "
        'state={"model": model, "optimizer": optimizer, ...} in torch, in JAX the train state '
        "that the step returns"
    )


def driver_for(
    state: Any, engine: Engine, framework: str | None, attach: Mapping[str, Any]
) -> Driver:
    """The driver of a state. Imports only a framework that is used.

    `framework` is detected if it is None; `attach` holds options of `healcore.torch.attach`. Raises
    UnknownState if no driver supports the state.
    """
    name = framework_of(state) if framework is None else framework
    if name not in FRAMEWORKS:
        raise UnknownState(f"framework is one of {', '.join(FRAMEWORKS)} or None, not {name!r}")
    if attach and name != "torch":
        raise UnknownState(f"attach holds options of healcore.torch.attach; this is {name}")
    options = {"attach": attach} if attach else {}  # torch only
    return adapter_registry.find(name, "driver")(state, engine, **options)
