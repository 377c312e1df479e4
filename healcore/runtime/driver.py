"""`Driver`: the interface between the `Healer` and a framework. Each adapter implements it.

`driver_for` chooses the driver for a state, and imports only its framework.

A driver reads and replaces the live state and the engine states in it. It decides nothing: the
Healer chooses the checkpoint, keeps budgets and learning rate, and determines when to save.

## The life of a driver

`driver_for` makes one driver for each run. The thread that trains makes all calls, except
`request_vote`, which a signal handler may call.

    open    driver_for ── ranks ── store ── settings, learning_rates
            resume: state (what to read), load
            otherwise: state, engines (the first snapshot)

    steps   take_dispatch ── structure_changes ── keep_weight_sample      after each dispatch
            PendingDispatch.read                                          some dispatches later
            may_save, state, engines                                      when a save is due
            copy_weights, losses_of, numbers, hold_numbers                when weights are compared

    rollback  nonfinite_weights ── load ── learning_rates

    memory ran out  window, memory_profile

    end     on_end ── pending_steps, is_interrupted, replaced_weights
            undo_window, state (a last save) ── close

## What a framework's training step does without the driver

The step itself judges and enforces, with `healcore.core.engine.Engine`: it measures `Signals`,
calls `Engine.step`, and carries out the `Decision` (skip, clip, scale the learning rate). It does
so before the host knows the result, and without waiting for the device. What the host has to know
of a step is its `StepRecord`. The driver copies it to the host in the background.

    training step, on the device           driver                        Healer
    ─────────────────────────────          ──────────────────            ─────────────────────────
    signals ── Engine.step ── update       take_dispatch: begin          queue the pending dispatch
                                           to copy the record            ... later: read, and act

## To write a third driver

1. Derive a class from `Driver`, and define its abstract methods. A method with a body is a default,
   for a framework without that feature.
2. Write an `ArrayFormat` (`healcore.runtime.store.array_format`) for `store`.
3. Enter the class in `healcore.adapter_registry.PROVIDED`, under "driver", and let `framework_of`
   recognize a state of the framework.
4. `tests/runtime/run/witness/toy_driver.py` is a driver of a model of one number, for comparisons.
   `adapters/jax/driver/driver.py` is the shorter of the two drivers in this repository.

How a loss and a state reach healcore differs: a torch step does not see the loss, so the program
reports it (`observe`); a step of JAX returns a new state, which the program passes on (`update`).
"""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from healcore import adapter_registry
from healcore.core.engine import Engine, StateError
from healcore.core.errors import HealcoreError
from healcore.core.step_record import StepRecord
from healcore.runtime.faults.microbatches import Gradients
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.store.values import attribute

WEIGHTS = "initial weights"
"""Name of the digest of the weights in `Driver.settings`."""
STEPPED = ", stepped"
"""End of the digest of a program that has loaded a snapshot: its optimizers have stepped before."""
Engines = Mapping[str, Mapping[str, Any]]
"""Engine name -> `Engine.to_dict`."""
Rates = Mapping[str, float | None]
"""Engine name -> a learning rate, or None if it is unknown.

The method that returns the rates says whether healcore's multiplier is part of each rate. The
rates of `Driver.learning_rates` are without the multiplier, and the rates of
`RunMetrics.rates_in_force` are with it.
"""
LossFn = Callable[..., Any]
"""The user's function of a batch, or of state and batch if the state is a value."""
LiveState = Any
"""The state as the user has passed it to the Healer: a mapping in torch, any pytree in JAX."""
Weights = Any
"""Result of `Driver.copy_weights`, which only the driver understands."""


class PendingDispatch(Protocol):
    """A step, or a compiled loop of several steps, whose records are being copied to the host.

    The Healer queues it, and reads it when later dispatches run on the device. So the host does not
    wait for the step that it has just started.
    """

    count: int
    """Expected number of steps; the result of `read` has the actual number.

    They differ if a step was not taken after all, for example because a compiled loop has ended.
    """
    vote_requested: bool
    """Whether a rank requested a vote (`Driver.request_vote`) before the last of these steps.

    The same on every rank. Valid after a call of `read`.
    """

    def read(self) -> list[list[StepRecord]]:
        """Waits for the records of each step.

        Returns:
            A list for each step, oldest first. It has one record per engine, or more if an engine
            judged several times in the step.
        """
        ...


class CompiledLoop(Protocol):
    """One call of `Healer.scan`: a loop that the framework compiles in blocks of updates."""

    def run(self, first: int, count: int) -> None:
        """Dispatches a block. Its records are a dispatch, which `take_dispatch` returns.

        Args:
            first: number of the block's first update.
            count: number of its updates.
        """
        ...

    def outputs(self) -> Any:
        """The outputs of all updates, stacked along a new first axis."""
        ...


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


class Driver(abc.ABC):
    """The framework's side of a healed run. A method that is not abstract is a default.

    The module describes when the methods are called, and how to write a driver. Three words:

    - An *engine* is the policy's state for one optimizer. Its name is the name of the optimizer in
      the user's state.
    - A *dispatch* is the unit in which steps become known to the host: a step, an accumulation
      window, or a compiled loop of several steps.
    - Two calls are the same on all ranks, and in the same order, if a method says *collective*.
    """

    framework: str
    """`torch` or `jax`. Names the framework in the log and in advice."""
    warnings: list[str]
    """Lines to log, oldest first; the run logs them and empties the list.

    For what a driver notices outside of a call that could return it, such as an optimizer that
    steps without a loss.
    """
    on_step: Callable[[], None]
    """Called by the driver after each optimizer step. The run sets it.

    The guard against hangs learns by it that the program is alive. It does not wait for the device.
    """
    window: Gradients
    """The gradients since the last step. After memory ran out, batches are repeated in smaller
    parts."""
    on_end: Callable[[], object] = staticmethod(lambda: None)
    """Called by the run before anything else when it ends, also by an exception.

    torch keeps the tensors of a device that has failed here: to free them would abort the process,
    before it has written a postmortem.
    """

    @property
    @abc.abstractmethod
    def live(self) -> LiveState:
        """The live state, as the user passed it.

        After a rollback of a state that is a value (a pytree in JAX), it is the restored state. The
        program gets it from `Healer.update` or `Healer.state`, and continues with it.
        """

    @property
    def state_is_in_place(self) -> bool:
        """Whether the program changes the state in place, and does not pass new values of it.

        True in torch, where the objects of the state stay the same. If it is True, `load` changes
        the objects that the program already holds. If it is False, the run can only be rolled back
        where the program passes its state.
        """
        return True

    # -- losses (torch) and states (JAX) --------------------------------------------------------

    def observe(self, loss: Any, optimizer: str | None = None, *, weight: float = 1.0) -> None:
        """torch: takes the loss of one (micro-)batch, before the optimizer's step.

        Args:
            loss: a number, or a tensor with one element, which may be on the device.
            optimizer: name of the optimizer that this loss trains, or None for all optimizers.
            weight: weight of this loss in the mean of the step.
        """
        raise NotImplementedError

    def observe_eval(self, eval_loss: Any, optimizer: str | None = None) -> None:
        """Takes the loss of an evaluation, as `observe`. In JAX the program passes it itself."""
        return

    def update(self, state: LiveState | None = None) -> None:
        """JAX: makes the result of a step the live state. See `Healer.update`.

        Args:
            state: the new state, or None for a state that was changed in place.
        """
        raise NotImplementedError

    def begin_scan(
        self, update: Callable[..., Any], state: LiveState, *, donate: bool
    ) -> CompiledLoop:
        """JAX: begins a loop that is compiled as a whole. See `Healer.scan`.

        Args:
            update: the program's function: state and number of the update -> state and outputs.
            state: the state to begin with.
            donate: whether a block reuses the memory of the state that it begins with.
        """
        raise NotImplementedError

    # -- steps ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def take_dispatch(self) -> PendingDispatch | None:
        """Starts to copy the records of the dispatch since the last call.

        The Healer calls it between any two batches, and often without a step in between. So it is
        cheap, and it does not wait for the device.

        Returns:
            The dispatch, or None if the program has taken no step since the last call.
        """

    def pending_steps(self) -> int:
        """Number of steps that `take_dispatch` has not returned, per optimizer, rounded up.

        `Healer.step` counts them already, and the end of a run must not lose them. 0 in JAX, where
        `update` makes each step known.
        """
        return 0

    def no_step_reason(self) -> str:
        """Why the steps of the program were not judged so far, and what to check in its loop.

        An empty string once a step was judged, if the program has taken none, and in JAX.
        """
        return ""

    @abc.abstractmethod
    def request_vote(self) -> None:
        """Marks the following steps on all ranks.

        The mark is part of the values that the ranks exchange at each step, and comes back as
        `PendingDispatch.vote_requested`. So all ranks learn at the same step that one of them has
        received a signal, and end together. Without it, a rank that ends alone would leave the
        others waiting in a collective call.

        It is called only with several ranks, also by signal handlers.
        """

    @abc.abstractmethod
    def expect_change(self) -> None:
        """Opens every engine's grace window, because the program is about to change the training.

        For example a new learning rate or other data. The engines then raise no alarm for a while,
        and learn the new level. See `Healer.expect_change`.
        """

    # -- the state ------------------------------------------------------------------------------

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """References to the state to save, not copied, without the engines.

        Returns:
            Name -> tree of arrays and Python values, or an object with `state_dict`. What
            `CheckpointStore.save` takes. The names are the same in each process.
        """

    @abc.abstractmethod
    def engines(self) -> dict[str, dict[str, Any]]:
        """The states of the engines now. Waits for the device.

        Returns:
            Engine name -> `Engine.to_dict` of its current state. The record of a checkpoint has it.
        """

    @abc.abstractmethod
    def load(
        self,
        state: Mapping[str, Any] | None,
        engines: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        """Replaces the live state and the states of engines, at a rollback and at a restart.

        Drops steps that `take_dispatch` has not returned. A new state zeroes accumulated gradients,
        also in optax.MultiSteps: no step has used them.

        Args:
            state: what `CheckpointStore.restore` returns for `state`, or None to keep the live
                state. Its arrays may become the live arrays, because they are in fresh memory.
            engines: engine name -> `Engine.to_dict`. Engines without a name here stay.

        Raises:
            StateMismatch: the state does not fit; the live state is unchanged.
            StateError: an engine state is of another policy, or the run has no such engine; the
                live states are unchanged.
        """

    def structure_changes(self) -> list[str]:
        """What the program has changed in the structure of its state since the last call, as texts.

        Parameters that were added, removed, replaced or resized, for example by pruning, by a wider
        layer or by a new parameter group. Checkpoints from before do not fit the state any more:
        the run then saves a new one, and no rollback crosses the change.

        Called once per dispatch, so a call without a change is cheap.

        Returns:
            The changes, as texts for the log. Empty without a change, and for a driver whose state
            keeps its structure.
        """
        return []

    @abc.abstractmethod
    def may_save(self, patience: int | None = None) -> bool:
        """Whether no gradients are accumulated, which a checkpoint does not hold.

        A run that resumes from within an accumulation would lose the gradients so far.

        Args:
            patience: number of steps after which gradients of an optimizer that no longer steps
                count as abandoned, or None for never. Otherwise one frozen optimizer would prevent
                all saves.
        """

    def is_interrupted(self) -> bool:
        """Whether an exception has interrupted an update: the state may be half updated.

        Such a state is never saved. The next start resumes from the checkpoint before.
        """
        return False

    @abc.abstractmethod
    def undo_window(self) -> str:
        """Undoes the changes by batches since the last step, which a restart reads again.

        For example statistics of batch normalization, which each forward pass changes. Called
        before a save after an exception within a step.

        Returns:
            The reason why the changes cannot be undone, or an empty string. With a reason, the run
            does not save.
        """

    # -- weights --------------------------------------------------------------------------------

    def keep_weight_sample(self) -> None:  # noqa: B027 -- the default does nothing
        """Keeps a sample of the weights, which are the weights of the training now.

        Called at each step, so its cost does not depend on the size of the model, and it does not
        wait for the device. JAX has no sample of a pytree, because only `update` changes it.
        """

    def replaced_weights(self) -> list[str]:
        """Names of sampled parameters that have changed since the last `keep_weight_sample`.

        For example because the program has copied averaged weights into the model, to evaluate
        them. A save at the end of the run would hold these, and a restart would train them.

        Waits for the device.

        Returns:
            The names. Empty for a driver without a sample.
        """
        return []

    def has_finite_weights(self) -> bool:
        """Whether all parameters are finite now. Waits for the device.

        Asked before each save. A driver that knows this faster than by names overrides it.
        """
        return not self.nonfinite_weights()

    @abc.abstractmethod
    def nonfinite_weights(self) -> list[str]:
        """Names of the parameters with NaN or Inf now. Waits for the device.

        Returns:
            The names, in the order of the parameters.
        """

    @abc.abstractmethod
    def copy_weights(self) -> Weights:
        """A copy on the host of the parameters that the optimizers train, for `losses_of`.

        With the statistics of batch normalization, which a layer in evaluation mode reads.
        Each rank copies its shards of sharded parameters. The Healer keeps a few such copies, and
        compares the current weights with them.
        """

    @abc.abstractmethod
    def losses_of(
        self,
        loss_fn: LossFn,
        batches: Iterable[Any],
        weights: Weights | None = None,
    ) -> list[Any]:
        """The result of `loss_fn` for each batch, on the host, in training mode.

        Without gradients, unless `loss_fn` computes some; `.grad` is unchanged afterwards. Every
        call draws the random numbers that the next step will draw, so that two calls differ by the
        weights only. The run's state is unchanged afterwards.

        Args:
            loss_fn: the user's function.
            batches: batches as the loop receives them.
            weights: result of `copy_weights`, or None for the current weights. Everything else
                in the state stays: other buffers, averages of the weights, teachers.

        Raises:
            WeightsChanged: `weights` is a copy of other parameters. `loss_fn` was not called.
            SignalError: `loss_fn` changes its batch.
            DataError: the compiled training step has deleted a batch.
        """

    @abc.abstractmethod
    def memory_profile(self) -> tuple[str, bytes]:
        """What holds the memory of the device, to be written to a file.

        Returns:
            The suffix of the file, and its content.
        """

    # -- numbers of the program -----------------------------------------------------------------

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The hyperparameters in the state, and `WEIGHTS`, a digest of the weights.

        A restart compares them with the run's settings, and names what the user has changed. In
        torch the classes of optimizers and schedulers come first. A scheduled value is its start
        value where it is known. Arguments of schedulers are included: a checkpoint restores them.

        Returns:
            Name -> number, text, bool, or a list of these, see `json_setting`. The value of
            `WEIGHTS` is a digest of some values of each parameter, equal in all processes.
        """

    @abc.abstractmethod
    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        """The learning rates that the program uses now.

        Args:
            engines: states of the engines that belong to the live weights, or None for the live
                ones. A rate that the program passes to each step (JAX) is in these states. After
                a rollback the live states still have the rate of the last undone step.

        Returns:
            Engine name -> learning rate without healcore's multiplier, or None if unknown. A
            rollback can limit only a known rate.
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
            step, and for a driver that cannot read numbers.
        """
        return {}

    def hold_numbers(self, ranges: Mapping[str, NumberRange]) -> None:  # noqa: B027 -- as above
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

    @abc.abstractmethod
    def store(self, where: Any) -> CheckpointStore:
        """Makes the default store of the framework.

        Args:
            where: path of a directory, or None for host memory only.

        Raises:
            StoreError: the directory cannot be used.
        """

    @abc.abstractmethod
    def ranks(self) -> Ranks:
        """The ranks of this run, which exchange small items. `Alone()` for a single process.

        Called once, at the start. A driver may create a process group of its own for it, so that
        the exchanges of checkpoints do not mix with the exchanges of the training.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Removes the hooks that the driver has installed. The program may train on without it."""


def json_setting(value: Any) -> Any:
    """A hyperparameter as a JSON value, for `Driver.settings`.

    Args:
        value: any object.

    Returns:
        The bool, text, number or list. NaN and Inf become texts, because JSON has no number for
        them. None for a tensor, a function or another object, and for a list with such an item.
    """
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        if math.isfinite(value):
            return value
        return str(value)
    if isinstance(value, tuple | list):
        items = [json_setting(each) for each in value]
        if items and None not in items:
            return items
    return None


def check_engines(engines: Iterable[str], present: Iterable[str]) -> None:
    """Checks the names of engines before `Driver.load` changes anything.

    Args:
        engines: names of engine states to load.
        present: names of the engines of the run.

    Raises:
        StateError: the run has no engine of one of the names.
    """
    known = list(present)
    for name in engines:
        if name not in known:
            raise StateError(
                f"this run has no engine named {name!r}, its engines are {', '.join(known)}: "
                "pass the healing state of a run with the same optimizers"
            )


class HealerError(HealcoreError, RuntimeError):
    """A method was called outside the Healer's block, or for the other framework.

    The message says what to call instead, such as `tx.update(..., value=loss)` in JAX.
    """

    __module__ = "healcore.errors"


_LOSS_IN_JAX = (
    "pass the loss to the optimizer, as in tx.update(grads, opt_state, params, value=loss), and "
    "the new state to healer.update(state)"
)
_ADVICE = {
    "healer.loss(batch)": _LOSS_IN_JAX,
    "healer.observe(loss)": _LOSS_IN_JAX,
    "healer.update(state)": (
        "a step changes the state in place, so only call optimizer.step(), in a loop over "
        "healer.batches or healer.steps, or before healer.after_step()"
    ),
    "healer.scan(...)": (
        "no loop is compiled as a whole, so write `for step in healer.steps(n)` around the "
        "training step"
    ),
}
"""Method of the Healer for one framework -> what to write in the other one."""


def check_framework(driver: Driver, wanted: str, method: str) -> None:
    """Checks that a method of the Healer is for the framework of its state.

    Args:
        driver: the driver of the state.
        wanted: the framework of the method, "torch" or "JAX".
        method: the method, a key of `_ADVICE`.

    Raises:
        HealerError: the method is for the other framework.
    """
    framework = driver.framework.replace("jax", "JAX")
    if framework != wanted:
        raise HealerError(
            f"{method} is for {wanted}, and the state of this Healer is of {framework}: "
            f"{_ADVICE[method]}"
        )


class UnknownState(HealcoreError, TypeError):
    """A state that no driver supports; the message explains what to pass instead."""

    __module__ = "healcore.errors"


def trainer_limit(state: LiveState) -> float | None:
    """Max gradient norm of the trainer that owns an optimizer of the state, or None.

    A part of the state that a trainer's integration has made has the attributes `attach_with` and
    `trainer_limit`.

    Args:
        state: the state as the user has passed it.

    Returns:
        The smallest of the limits, or None if no trainer owns an optimizer or none has a limit.
    """
    if not isinstance(state, Mapping):
        return None
    limits: list[float] = []
    for part in state.values():
        if attribute(part, "attach_with"):
            limit = attribute(part, "trainer_limit")
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def framework_of(state: LiveState) -> str:
    """Name of a state's framework. Imports no framework: the program has imported its own.

    Args:
        state: the state as the user has passed it.

    Returns:
        "torch" for a mapping that has a module or an optimizer of torch, otherwise "jax" in a
        program that has imported JAX.

    Raises:
        UnknownState: the program has imported no framework, or torch only and passes no part of it.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(state, Mapping):
        kinds = (torch.optim.Optimizer, torch.nn.Module)
        for part in state.values():
            if isinstance(getattr(part, "optimizer", part), kinds):
                return "torch"
    if jax is not None:
        return "jax"
    raise UnknownState(
        f"state is a {type(state).__name__} and has no part of torch or JAX: pass "
        'state={"model": model, "optimizer": optimizer, ...} in torch, in JAX the train state '
        "that the step returns"
    )


def driver_for(state: LiveState, engine: Engine, attach: Mapping[str, Any]) -> Driver:
    """Creates the driver of a state, and imports only its framework.

    Args:
        state: the state as the user has passed it.
        engine: the policy's engine, of which the driver keeps one state per optimizer.
        attach: options of `healcore.torch.attach`; empty for other frameworks.

    Raises:
        UnknownState: no driver supports the state, or `attach` is given for another framework.
    """
    name = framework_of(state)
    if attach and name != "torch":
        given = ", ".join(attach)
        raise UnknownState(
            f"attach has options of healcore.torch.attach ({given}), and this state is of {name}: "
            "pass no `attach`; options of a step in JAX are arguments of healcore.jax.protect"
        )
    make_driver = adapter_registry.find(name, "driver")
    if attach:
        return make_driver(state, engine, attach=attach)
    return make_driver(state, engine)
