"""`Driver`: the interface between the `Healer` and a framework. Each adapter implements it.

A driver reads and replaces the live state and the engine states in it. It decides nothing: the
Healer chooses the checkpoint, keeps budgets and learning rate, and determines when to save.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from healcore import adapter_registry
from healcore.core.decision import StepRecord
from healcore.core.engine import Engine, StateError
from healcore.core.errors import HealcoreError
from healcore.runtime.faults.microbatches import Gradients
from healcore.runtime.store.checkpoints import CommonState, StateMismatch
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.store.values import attribute

Engines = Mapping[str, Mapping[str, Any]]
"""Engine name -> `Engine.to_dict`."""
Rates = Mapping[str, float | None]
"""Engine name -> the schedule's learning rate, or None if it is unknown."""
LossFn = Callable[..., Any]
"""The user's function of a batch, or of state and batch if the state is a value."""


class PendingDispatch(Protocol):
    """A step, or a compiled loop of several steps, whose records are being copied to the host."""

    count: int
    """Expected number of steps; the result of `read` has the actual number."""
    vote_requested: bool
    """Whether a rank requested a vote (`Driver.request_vote`) before the last of these steps.

    The same on every rank. Valid after a call of `read`.
    """

    def read(self) -> list[list[StepRecord]]:
        """Waits for the records of each step, and returns them, oldest step first.

        A step has one record per engine, or more if an engine judged several times in the step.
        """
        ...


DIGESTED = 64
"""Values of each parameter in the digest of the initial weights, see `Driver.settings`."""


class NumberRange(NamedTuple):
    """The values that a number of an optimizer has had, such as a weight decay or a beta."""

    low: float
    """Lowest value."""
    high: float
    """Highest value."""
    last: float
    """Newest value."""


class WeightsChanged(Exception):
    """The run has added, removed, frozen or resized parameters since a copy of its weights."""


class Driver(Protocol):
    """The framework's side of a healed run. A method with a body is a default."""

    framework: str
    """`torch` or `jax`."""
    warnings: list[str]
    """Lines to log, oldest first; the run logs them and empties the list."""
    start_lines: list[str] = []  # noqa: RUF012 -- never changed
    """Lines about the state for the log at the start of the run."""
    on_step: Callable[[], None]
    """Called after each optimizer step. The run sets it. Does not wait for the device."""
    window: Gradients
    """The gradients since the last step, to repeat batches in smaller parts."""
    on_end: Callable[[], object] = staticmethod(lambda: None)
    """Called before anything else when the run ends, also by an exception."""

    @property
    def live(self) -> Any:
        """The live state, as the user passed it."""
        ...

    @property
    def state_is_in_place(self) -> bool:
        """Whether the program changes the state in place, and does not pass new values of it."""
        return True

    # -- steps ----------------------------------------------------------------------------------

    def take_dispatch(self) -> PendingDispatch | None:
        """Starts to copy the records of the dispatch since the last call. None without one."""
        ...

    def pending_steps(self) -> int:
        """Steps of each optimizer, rounded up, that `take_dispatch` has not returned. 0 in JAX."""
        return 0

    def request_vote(self) -> None:
        """Marks the following steps on all ranks.

        The mark is part of the values that the ranks exchange at each step, and comes back as
        `PendingDispatch.vote_requested`. Only called with several ranks, also by signal handlers.
        """
        ...

    def expect_change(self) -> None:
        """Opens every engine's grace window."""
        ...

    # -- the state ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """References to the state to save: name -> tree or object with `state_dict`; no engines."""
        ...

    def engines(self) -> dict[str, dict[str, Any]]:
        """Engine name -> `Engine.to_dict` of its current state. Waits for the device."""
        ...

    def load(
        self,
        state: Mapping[str, Any] | None,
        engines: Mapping[str, Mapping[str, Any]] = {},
        *,
        reset_moments: bool = False,
    ) -> None:
        """Replaces the live state, unless it is None, and the named engine states.

        Drops steps that `take_dispatch` has not returned. A new state zeroes accumulated gradients,
        also in optax.MultiSteps: no step has used them. `reset_moments` resets moments and bias
        correction to their initial values and leaves schedules unchanged.

        Raises:
            StateMismatch: the state does not fit; the live state is unchanged.
            StateError: an engine state is of another policy, or the run has no such engine; the
                live states are unchanged.
        """
        ...

    def structure_changes(self) -> list[str]:
        """What the program has changed in the structure of its state since the last call, as texts.

        Parameters that were added, removed, replaced or resized, for example by pruning, by a wider
        layer or by `add_param_group`. Checkpoints from before do not fit the state any more. Called
        once per dispatch, so a call without a change is cheap. Empty without a change, and for a
        driver whose state keeps its structure.
        """
        return []

    def load_common(self, saved: CommonState) -> None:
        """Loads what a checkpoint from before a change of structure has in common with the state.

        Weights and moments of the parameters that have the same name and shape on both sides. All
        other parameters stay as they are, with an empty optimizer state. Learning rates, schedules
        and other settings stay as they are too.

        Raises:
            StateMismatch: nothing fits, or a parameter that would stay is not finite. The live
                state is unchanged.
        """
        raise StateMismatch(None, ["the structure of the state differs"])

    def param_groups(self) -> dict[str, list[list[str]]]:
        """Optimizer -> names of the parameters of each group. Slow. Empty in JAX."""
        return {}

    def add_param_groups(self, groups: Mapping[str, list[list[str]]]) -> list[str]:
        """Adds the groups that a checkpoint has and a fresh program has not added yet.

        Args:
            groups: result of `param_groups` when the checkpoint was saved.

        Returns:
            The names of the parameters that an optimizer has received.
        """
        return []

    def moments_obstacle(self) -> str:
        """Reason why the moments cannot be reset, or an empty string."""
        ...

    def may_save(self, patience: int | None = None) -> bool:
        """Whether no gradients are accumulated, which a checkpoint does not hold.

        After `patience` steps, gradients of an optimizer that no longer steps count as abandoned.
        """
        ...

    def is_interrupted(self) -> bool:
        """Whether an exception has interrupted an update: the state may be half updated."""
        return False

    def undo_window(self) -> str:
        """Undoes the changes by batches since the last step, which a restart reads again.

        Called before a save after an exception within a step. Returns the reason why the changes
        cannot be undone, or an empty string.
        """
        ...

    # -- weights --------------------------------------------------------------------------------

    def keep_weight_sample(self) -> None:
        """Keeps a sample of the weights, which are those of the training now.

        Called at each step, so its cost does not depend on the size of the model, and it does not
        wait for the device. JAX has no sample of a pytree, because only `update` changes it.
        """

    def replaced_weights(self) -> list[str]:
        """Names of sampled parameters that have changed since the last `keep_weight_sample`.

        For example because the program has copied averaged weights into the model, to evaluate
        them. Waits for the device.
        """
        return []

    def has_finite_weights(self) -> bool:
        """Whether all parameters are finite now. Waits for the device."""
        return not self.nonfinite_weights()

    def nonfinite_weights(self) -> list[str]:
        """Names of the parameters with NaN or Inf now, in their order. Waits for the device."""
        ...

    def copy_weights(self) -> Any:
        """A copy on the host, for `losses_of`, of the parameters that the optimizers train.

        With the statistics of batch normalization, which a layer in evaluation mode reads.
        Each rank copies its shards of sharded parameters.
        """
        ...

    def losses_of(
        self, loss_fn: LossFn, batches: Iterable[Any], weights: Any = None, *, redraw: bool = False
    ) -> list[Any]:
        """The result of `loss_fn` for each batch, on the host, in training mode.

        Without gradients, unless `loss_fn` computes some; `.grad` is unchanged afterwards. Every
        call draws the random numbers that the next step will draw, so that two calls differ by the
        weights only; with `redraw` other numbers. The run's state is unchanged afterwards.

        Args:
            loss_fn: the user's function.
            batches: batches as the loop receives them.
            weights: result of `copy_weights`, or None for the current weights. Everything else
                in the state stays: other buffers, averages of the weights, teachers.
            redraw: whether to draw other random numbers.

        Raises:
            WeightsChanged: `weights` is a copy of other parameters. `loss_fn` was not called.
            SignalError: `loss_fn` changes its batch.
            DataError: the compiled training step has deleted a batch.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by owner after an out-of-memory error; `activations` are all other memory."""
        ...

    def missing_moments(self) -> tuple[int, int] | None:
        """Bytes of the moments that the optimizers create at their first step.

        Of all ranks together, and of this process. None if they are unknown.
        """
        return 0, 0

    def memory_profiles(self) -> dict[str, bytes]:
        """Suffix of a file -> content: the framework's own profile of the device's memory.

        Empty where the framework has none, as torch on a CPU.
        """
        return {}

    # -- numbers of the program -----------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The hyperparameters in the state, and `WEIGHTS`: name -> number, text, bool, or a list.

        In torch the classes of optimizers and schedulers come first. A scheduled value is its start
        value where it is known. Arguments of schedulers are included: a checkpoint restores them.
        `WEIGHTS` is a digest of a sample of each parameter, equal in all processes; see `STEPPED`.
        """
        ...

    def learning_rates(self) -> dict[str, float | None]:
        """Engine name -> learning rate without healcore's multiplier, or None if unknown."""
        ...

    def trained_rates(self) -> dict[str, float | None]:
        """The `learning_rates` of the last step. The program may have set the next rate already.

        In torch a scheduler does so, and the rates are those of the last step from `watch_numbers`
        on.
        """
        return self.learning_rates()

    def watch_numbers(self) -> None:
        """Begins to read the numbers of the optimizers at each step. A step is then a bit slower.

        JAX reads them in any case, within the jitted step.
        """

    def numbers(self) -> dict[str, NumberRange]:
        """The numbers that the program gave to its optimizers, since the last `hold_numbers`.

        These are the numbers of every parameter group except the learning rate, for example
        ``optimizer.weight_decay`` or ``optimizer[1].betas[0]`` (the second group) in torch, and the
        numbers of `optax.inject_hyperparams` in JAX, for example ``b2``. They are read within the
        steps, so a value that the program sets for one step only is seen too. They are the
        program's values, also where a number is held. A NaN extends a range to -inf and inf, which
        no other range includes. May wait for the device.

        Returns:
            Name -> range over all judged steps, also over skipped steps. Empty before the first
            step, and for a driver that cannot read numbers. In torch empty until `watch_numbers`.
        """
        return {}

    def suspect_numbers(self) -> list[str]:
        """The numbers by which an optimizer made NaN or Inf of finite gradients.

        For example ``["b2 is 1.0"]``. Empty if no number is suspect. May wait for the device.
        """
        return []

    def hold_numbers(self, ranges: Mapping[str, NumberRange]) -> None:
        """Holds numbers of the optimizers in their ranges, and restarts the ranges of `numbers`.

        From now on, a step at which the program's value of a number in `ranges` is below `low` or
        above `high` (or NaN) uses `last` instead. The program's own value is back after the step.
        All other numbers are as the program sets them, so ``hold_numbers({})`` releases every
        number. In observe mode no step changes.

            driver.hold_numbers({"optimizer.weight_decay": NumberRange(0.01, 0.1, 0.05)})

        In JAX the call edits the live state, as `load` does, so the next step has to start from the
        state that `live` has then.

        Args:
            ranges: names as `numbers` returns them -> range and value. A name that this run does
                not have now is ignored.
        """

    # -- the run --------------------------------------------------------------------------------

    def store(self, where: Any) -> CheckpointStore:
        """The default store: host memory, and a directory unless `where` is None."""
        ...

    def ranks(self) -> Ranks:
        """The ranks of this run."""
        ...

    def close(self) -> None:
        """Removes the hooks that the driver has installed."""
        ...


WEIGHTS = "initial weights"
"""Name of the digest of the weights in `Driver.settings`."""
STEPPED = ", stepped"
"""End of the digest of a program that has loaded a snapshot: its optimizers have stepped before."""


def check_engines(engines: Iterable[str], present: Iterable[str]) -> None:
    """Raises StateError unless all names in `engines` are engines of the run, `present`."""
    known = list(present)
    for name in engines:
        if name not in known:
            raise StateError(
                f"this run has no engine named {name!r}, its engines are {', '.join(known)}: "
                "pass the healing state of a run with the same optimizers"
            )


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
    limits = [attribute(part, "trainer_limit") for part in parts if attribute(part, "attach_with")]
    return min((limit for limit in limits if limit is not None), default=None)


def framework_of(state: Any) -> str:
    """Name of a state's framework. Raises UnknownState if it is neither of torch nor of JAX."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(state, Mapping):
        kinds = (torch.optim.Optimizer, torch.nn.Module)
        if any(isinstance(getattr(each, "optimizer", each), kinds) for each in state.values()):
            return "torch"
    if jax is not None:
        return "jax"
    raise UnknownState(
        f"state is a {type(state).__name__} and has no part of torch or JAX: pass "
        'state={"model": model, "optimizer": optimizer, ...} in torch, in JAX the train state '
        "that the step returns"
    )


def driver_for(state: Any, engine: Engine, attach: Mapping[str, Any]) -> Driver:
    """Creates the driver of a state, and imports only its framework.

    `attach` holds options of `healcore.torch.attach`. Raises UnknownState without a driver.
    """
    name = framework_of(state)
    if attach and name != "torch":
        raise UnknownState(f"attach holds options of healcore.torch.attach; this is {name}")
    options = {"attach": attach} if attach else {}  # torch only
    return adapter_registry.find(name, "driver")(state, engine, **options)
