"""`TorchDriver`: gives the Healer access to a training run in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.console import first_of
from healcore.core.engine import Engine
from healcore.core.engine.config import table_differences, tables_of
from healcore.core.errors import AttachError
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.driver import STEPPED, WEIGHTS, Driver, Engines, NumberRange, check_engines
from healcore.runtime.store.checkpoints import BUFFERS_ITEM, IN_MEMORY
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.store.values import attribute
from healcore.torch import gradients, live_state
from healcore.torch.attachment import Healing, attach, healing_of
from healcore.torch.driver.buffers import UnsavedBuffers, buffers_of
from healcore.torch.driver.followed_optimizer import FollowedOptimizer, PendingEntry, PendingStep
from healcore.torch.driver.gradient_window import GradientWindow
from healcore.torch.driver.memory import memory_profile
from healcore.torch.driver.structure import StructureWatch
from healcore.torch.driver.weights import Key, TorchWeights, WeightSample
from healcore.torch.live_engine import keep_after_cuda_error
from healcore.torch.live_state import State
from healcore.torch.measurement import Measurement
from healcore.torch.optimizer_numbers import OptimizerNumbers
from healcore.torch.store import DCPStore, MemoryStore, apply
from healcore.torch.store.gloo import GlooRanks


class TorchDriver(Driver):
    """Implements `healcore.runtime.driver.Driver` for a run in torch.

    The program steps its optimizers by itself. The driver follows it with hooks, and the Healer
    asks the driver between two batches what has happened:

        program        observe ─► backward ─► optimizer.step()
        in the step    HealedStep judges ─► FollowedOptimizer keeps a PendingEntry
        Healer         take_dispatch ─► PendingStep, some batches later read ─► StepRecords

    What belongs to one optimizer is in its `FollowedOptimizer`. The other parts see all optimizers.
    The other methods answer questions about the live state (weights, numbers, structure), or
    change it (`load`, `hold_numbers`). See `Driver` for what each method has to do.

    Args:
        state: name -> module, optimizer, scheduler, scaler, tree of tensors, or any object with
            `state_dict` and `load_state_dict`. Every optimizer among the values is healed. An
            optimizer that is already attached with the same policy keeps its handle.
        policy: as for `attach`; one engine for each optimizer.
        attach: further options for `attach`, the same for all optimizers. If the state has exactly
            one GradScaler, it is used as the scaler.

    Raises:
        AttachError: the state cannot be healed, or `attach` raises it. Nothing was changed.
    """

    window: GradientWindow
    framework = "torch"
    on_end = staticmethod(keep_after_cuda_error)

    def __init__(
        self,
        state: State,
        policy: PolicyLike = "default",
        attach: Mapping[str, Any] = {},
    ) -> None:
        self._user_state = state
        self._state = live_state.checked_state(state)
        self.warnings: list[str] = []
        healings, own = _attach_all(self._state, engine_of(policy), attach)
        self.healings = healings
        """The handle of each optimizer, by its name in the state."""
        self._own_healings = own
        """The handles that this driver has made, and detaches in `close`."""
        self._optimizers = {name: healing.optimizer for name, healing in healings.items()}
        """The optimizers by name, without wrappers."""
        self.on_step: Callable[[], None] = lambda: None
        self._pending: list[PendingEntry] = []
        """The judged steps since the last `take_dispatch`, oldest first."""
        self._followed: list[FollowedOptimizer] = []
        for name in healings:
            self._followed.append(
                FollowedOptimizer(
                    name, self._state, healings, self._pending, self.warnings, self._after_step
                )
            )
        self._follow_structure()
        self._unsaved = UnsavedBuffers(self._state, lambda: len(self._members) > 1)
        self._weights = TorchWeights(self._state, healings, self._followed)
        modules = [value for value in self._state.values() if isinstance(value, nn.Module)]
        self.window = GradientWindow(self._followed, modules)
        self._structure = StructureWatch(self._state, self._optimizers)
        self._numbers: list[OptimizerNumbers] = []
        for followed in self._followed:
            step = followed.healing.healed_step
            step.listener = followed
            step.measurer.modules = modules
            step.numbers = OptimizerNumbers(step.optimizer, followed.name)
            self._numbers.append(step.numbers)

    @property
    def live(self) -> Mapping[str, Any]:
        """The mapping that the user passed."""
        return self._user_state

    # -- signals from the loop ------------------------------------------------------------------

    def observe(
        self, loss: Tensor | float, optimizer: str | Optimizer | None = None, *, weight: float = 1.0
    ) -> None:
        """Reports a loss. See `Healing.observe`.

        Also notes the `torch.autocast` of the loop, in which comparisons compute their losses.

        Args:
            loss: the loss of one (micro-)batch.
            optimizer: the optimizer that this loss trains, as the object or by its name in the
                state; or None for all optimizers.
            weight: weight of this loss in the mean of the step.

        Raises:
            AttachError: the state has no such optimizer.
            SignalError: see `Healing.observe`.
        """
        kind = "cpu"
        if isinstance(loss, Tensor):
            kind = loss.device.type
        self._weights.autocast = None
        if torch.is_autocast_enabled(kind):
            self._weights.autocast = (kind, torch.get_autocast_dtype(kind))
        for healing in self._healings_of(optimizer):
            healing.observe(loss, weight=weight)

    def observe_eval(
        self, eval_loss: Tensor | float, optimizer: str | Optimizer | None = None
    ) -> None:
        """Reports the loss of an evaluation. See `Healing.observe_eval`.

        Args:
            eval_loss: the loss.
            optimizer: as for `observe`.

        Raises:
            AttachError: the state has no such optimizer.
            SignalError: see `Healing.observe`.
        """
        for healing in self._healings_of(optimizer):
            healing.observe_eval(eval_loss)

    # -- steps ----------------------------------------------------------------------------------

    def take_dispatch(self) -> PendingStep | None:
        """The steps judged since the last call, or None. No host sync.

        The Healer calls it between two batches. It is also the place where gradients and losses
        that no step will use are dropped.

        Returns:
            The judged steps as one step, to be read later. None if no optimizer has stepped.
        """
        for followed in self._followed:
            followed.healing.healed_step.judge_dropped()
        if self.window.may_save():
            for followed in self._followed:
                followed.buffers.keep_written()
        step: PendingStep | None = None
        if self._pending:
            step = PendingStep([*self._pending])
            self._pending.clear()
        self.window.end_batch(judged=step is not None)
        return step

    def pending_steps(self) -> int:
        """See `Driver.pending_steps`."""
        return math.ceil(len(self._pending) / len(self.healings))

    def no_step_reason(self) -> str:
        """See `Driver.no_step_reason`."""
        return self.window.no_step_reason()

    def request_vote(self) -> None:
        """Requests a vote in the all_reduce of each optimizer that all ranks step together.

        See `Driver.request_vote`. Other optimizers' steps do not carry the request.
        """
        everyone = len(self._members)
        for healing in self.healings.values():
            all_reduce = healing.healed_step.all_reduce
            all_reduce.requests_vote = all_reduce.ranks.world == everyone

    def expect_change(self) -> None:
        """Opens every engine's grace window at its next step.

        The buffers are saved as they are now, for example loaded with other weights. If the next
        step is skipped, it restores these values.
        """
        for followed in self._followed:
            followed.healing.expect_change()
            followed.buffers.end(False)

    # -- the state ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state as the user passed it, and the buffers that are not in `state_dict()`."""
        return {**self._state, BUFFERS_ITEM: self._unsaved}

    def engines(self) -> dict[str, dict[str, Any]]:
        """The states of the engines, which a checkpoint keeps. A sync on an accelerator.

        Returns:
            Optimizer name -> `Engine.to_dict`, JSON-safe. Steps that are judged later are judged
            now.
        """
        return {name: healing.state_dict() for name, healing in self.healings.items()}

    def load(
        self,
        state: Mapping[str, Any] | None,
        engines: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        """See `Driver.load`. A new state drops gradients and losses since the last step.

        Args:
            state: name -> saved value, or None to keep the live state.
            engines: name -> `Engine.to_dict` of the engines to replace.

        Raises:
            StateMismatch: see `Driver.load`.
            StateError: see `Driver.load`. All engine states are checked before anything changes.
        """
        check_engines(engines, self.healings)
        for name, data in engines.items():
            self.healings[name].live_engine.parse(data)
        if state is not None:
            apply(self.state(), state)
            self._sample.keep()
        for followed in self._followed:
            healing = followed.healing
            if state is not None:
                followed.clear(used=False)
                healing.healed_step.measurer.clear()
                followed.buffers.save()
            if followed.name in engines:
                # A state that only limits something is of the same step, so what the program has
                # reported for its next step still holds.
                healing.live_engine.load(engines[followed.name], rollback=False)
                healing.healed_step.on_state_loaded(keeps_signals=state is None)
        self._pending.clear()

    def structure_changes(self) -> list[str]:
        """See `Driver.structure_changes`.

        After a change, skipped steps restore the buffers of the current layers, and the sample is
        one of the current weights.
        """
        changes = self._structure.changes()
        if changes:
            self._follow_structure()
        return changes

    def may_save(self, patience: int | None = None) -> bool:
        """See `Driver.may_save`. False while any optimizer has gradients that no step has used.

        Gradients of an optimizer that has not stepped for `patience` steps of the other optimizers
        are by-products of their losses (a frozen discriminator, the first stage of a fine-tuning).
        They need no checkpoint.

        Args:
            patience: number of steps, or None to wait for every optimizer.
        """
        if any(attribute(item, "mid_accumulation") for item in self._state.values()):
            return False
        return self.window.may_save(patience)

    def is_interrupted(self) -> bool:
        """Whether an exception has interrupted an update, see `Driver.is_interrupted`.

        True within an optimizer's step. Also True if only some of the optimizers that stepped for
        the last batch have stepped since: the discriminator of a GAN, and not yet its generator.
        """
        if any(healing.healed_step.in_update for healing in self.healings.values()):
            return True
        return self.window.is_incomplete()

    def undo_window(self) -> str:
        """See `Driver.undo_window`.

        A forward pass has written buffers, and FSDP2 may have gathered parameters. Both are
        restored. Gradients and losses stay: a checkpoint has neither.
        """
        for followed in self._followed:
            followed.buffers.end(True)
        self._weights.reshard()
        return ""

    # -- weights and numbers --------------------------------------------------------------------

    def copy_weights(self) -> dict[Key, Tensor]:
        """See `Driver.copy_weights`."""
        return self._weights.copy()

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[Key, Tensor] | None = None,
    ) -> list[Any]:
        """See `Driver.losses_of`, and `TorchWeights.losses_of`."""
        return self._weights.losses_of(loss_fn, batches, weights)

    def keep_weight_sample(self) -> None:
        """See `Driver.keep_weight_sample`."""
        self._sample.keep()

    def replaced_weights(self) -> list[str]:
        """See `Driver.replaced_weights`."""
        return self._sample.changed()

    @torch.no_grad()
    def nonfinite_weights(self) -> list[str]:
        """See `Driver.nonfinite_weights`. One sync.

        With DTensors every rank of their meshes has to call it.
        """
        params = self._parameters()
        norms = Measurement(params=params, norms=gradients.norms(params)).to_host()
        nonfinite = [p for p, norm in zip(params, norms, strict=True) if not math.isfinite(norm)]
        return live_state.parameter_names(self._state, nonfinite)

    def memory_profile(self) -> tuple[str, bytes]:
        """See `Driver.memory_profile`. The bytes by owner, and CUDA's own summary."""
        return ".txt", memory_profile(self._state, list(self._optimizers.values()))

    def settings(self) -> dict[str, Any]:
        """See `Driver.settings`.

        Returns:
            The hyperparameters as in `live_state.hyperparameters`; "precision", the dtypes of the
            optimizers' parameters; and the digest of the weights.
        """
        settings = live_state.hyperparameters(self._state)
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self._parameters()}
        settings["precision"] = ", ".join(sorted(dtypes))
        settings[WEIGHTS] = self._weights.digest()
        if any(optimizer.state for optimizer in self._optimizers.values()):
            settings[WEIGHTS] += STEPPED
        return settings

    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        """See `Driver.learning_rates`. The optimizers have the rates, so no state is read."""
        largest: dict[str, float | None] = {}
        for name, optimizer in self._optimizers.items():
            rates = [group.get("lr") for group in optimizer.param_groups]
            largest[name] = max([float(rate) for rate in rates if rate is not None], default=None)
        return largest

    def numbers(self) -> dict[str, NumberRange]:
        """See `Driver.numbers`. No sync: tensors on an accelerator are not read."""
        ranges: dict[str, NumberRange] = {}
        for numbers in self._numbers:
            ranges.update(numbers.ranges())
        return ranges

    def hold_numbers(self, ranges: Mapping[str, NumberRange]) -> None:
        """See `Driver.hold_numbers`. In observe mode the numbers are only read.

        A step of which `torch.compile` has made a graph is compiled again when a number changes.

        Args:
            ranges: names as in `numbers()` -> range. An empty mapping releases every number.
        """
        for numbers in self._numbers:
            numbers.hold(ranges)

    # -- the run --------------------------------------------------------------------------------

    def store(self, where: Any) -> CheckpointStore:
        """The default store of a run. Every rank has to call it.

        Args:
            where: a directory, or None for host memory.

        Returns:
            A `DCPStore` in the directory, with copies in memory; or a `MemoryStore`.
        """
        if where is None:
            return MemoryStore()
        return DCPStore(where, in_memory=IN_MEMORY, ranks=self.ranks())

    def ranks(self) -> Ranks:
        """The ranks that step together, with a gloo group of their own.

        Each call creates a group, so all of these ranks have to call it.
        """
        members = self._members
        if len(members) > 1:
            return GlooRanks(members=members)
        return Alone()

    def close(self) -> None:
        """Removes hooks and handles, so that the program can go on without healcore.

        Handles that this driver has made are detached. The handle of an earlier `attach` belongs to
        the user, and continues to heal its optimizer.
        """
        self.window.close()
        for followed in self._followed:
            followed.healing.healed_step.remove_listener()
        for healing in self._own_healings:
            healing.detach()

    def _after_step(self, followed: FollowedOptimizer) -> None:
        """Notes a step of any optimizer, and calls `on_step` of the run."""
        self.window.on_step(followed)
        self.on_step()

    def _follow_structure(self) -> None:
        """Finds the buffers that forward passes write, and the weights of the sample.

        Called at the start and after a change of structure.
        """
        self._sample = WeightSample(self._state, self.healings)
        buffers = buffers_of(self._state, self.healings)
        for followed in self._followed:
            followed.buffers = buffers[followed.name]

    def _parameters(self) -> list[Tensor]:
        """The parameters of all optimizers, in order."""
        params: list[Tensor] = []
        for optimizer in self._optimizers.values():
            params += gradients.parameters(optimizer)
        return params

    @property
    def _members(self) -> list[int]:
        """Default-group numbers of the ranks that step together; empty for this rank alone.

        The longest list of any optimizer, because other optimizers may have fewer of the ranks.
        """
        healings = self.healings.values()
        return max((each.healed_step.all_reduce.ranks.members for each in healings), key=len)

    def _healings_of(self, optimizer: str | Optimizer | None) -> list[Healing]:
        """The handle of an optimizer, given as the object or by its name, or all handles."""
        found: list[Healing] = []
        for name, healing in self.healings.items():
            if optimizer is None or optimizer in (name, healing.optimizer, self._state[name]):
                found.append(healing)
        if found:
            return found
        raise AttachError(
            f"there is no optimizer {optimizer!r:.60} in the state: pass one of "
            f"{', '.join(self.healings)}, by name or as the object"
        )


def _attach_all(
    state: State, engine: Engine, options: Mapping[str, Any]
) -> tuple[dict[str, Healing], list[Healing]]:
    """Heals every optimizer of a state by the same policy.

    An optimizer that was healed before keeps its handle, because the program may report losses to
    it. A trainer's optimizer brings a method `attach_with` of its own.

    Args:
        state: the checked state of the run.
        engine: the policy's engine, without a state.
        options: options of `attach`. If they have no scaler, and the state has exactly one
            GradScaler, it is used as the scaler.

    Returns:
        The handle of each optimizer, by its name in the state; and the handles among them that were
        made here. The caller has to detach these when the run ends.

    Raises:
        AttachError: an optimizer belongs to another Healer or another policy, or `attach` raises
            it. The handles that were made before the error are detached: nothing was changed.
    """
    healings: dict[str, Healing] = {}
    own: list[Healing] = []
    options = {"scaler": live_state.scaler(state), **options}
    try:
        for name, optimizer in live_state.optimizers(state).items():
            healing = healing_of(optimizer)
            if healing is not None:
                _check_attached(name, healing, engine)
            else:
                heal = getattr(state[name], "attach_with", None) or partial(attach, state[name])
                healing = heal(engine, **options)
                own.append(healing)
            healings[name] = healing
    except BaseException:
        for healing in own:
            healing.detach()
        raise
    return healings, own


def _check_attached(name: str, healing: Healing, engine: Engine) -> None:
    """Raises AttachError unless the handle of an earlier `attach` can be used."""
    if healing.healed_step.listener is not healing.healed_step.attach_log:
        raise AttachError(
            f'"{name}" belongs to a Healer that is still open: leave its `with` block, or '
            "delete the object"
        )
    differences = table_differences(tables_of(healing.engine.config), tables_of(engine.config))
    if differences:
        raise AttachError(
            f'"{name}" is healed already under another policy than the policy of the Healer '
            f"({first_of(differences, 5, '; ')}): detach() its handle, or attach with the "
            "policy of the Healer"
        )
