"""`TorchDriver`: gives the Healer access to a training run in torch."""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore import console
from healcore.console import first_of
from healcore.core.decision import StepRecord
from healcore.core.engine.state import config_differences
from healcore.core.errors import AttachError
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.driver import STEPPED, WEIGHTS, Driver, NumberRange, check_engines
from healcore.runtime.store.checkpoints import IN_MEMORY, CommonState
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.store.values import attribute
from healcore.torch import gradients, live_state
from healcore.torch.attachment import Healing, healing_of
from healcore.torch.attachment import attach as attach_to
from healcore.torch.driver.accumulation import Accumulation, GradientWindow
from healcore.torch.driver.added_groups import AddedGroups, group_names
from healcore.torch.driver.batch_statistics import BatchStatistics
from healcore.torch.driver.pending_step import MOST_EARLY, PendingEntry, PendingStep, Recorder
from healcore.torch.driver.structure import StructureWatch
from healcore.torch.driver.weight_sample import WeightSample
from healcore.torch.driver.weights import TorchWeights
from healcore.torch.enforcer import moments_obstacle
from healcore.torch.enforcer import reset_moments as reset_moments_of
from healcore.torch.engines import keep_after_cuda_error
from healcore.torch.expected_moments import missing_moments
from healcore.torch.optimizer_numbers import OptimizerNumbers
from healcore.torch.store import DCPStore, MemoryStore, apply
from healcore.torch.store.gloo import GlooRanks
from healcore.torch.store.partial_restore import load_common

WITHOUT_POLL = 100
"""Steps before the first call of `take_dispatch` after which a line says so."""


class TorchDriver(Driver):
    """Implements `healcore.runtime.driver.Driver`.

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

    framework = "torch"
    on_end = staticmethod(keep_after_cuda_error)

    def __init__(
        self,
        state: Mapping[str, Any],
        policy: PolicyLike = "default",
        attach: Mapping[str, Any] = {},
    ) -> None:
        self._given = state
        self._state = live_state.checked_state(state)
        self.start_lines = [
            f'state["{name}"] is an environment without state_dict() and load_state_dict(), which '
            "cannot be saved: a restart resumes with a new episode, and after a rollback the "
            "current episode continues"
            for name in state
            if name not in self._state
        ]
        self.healings: dict[str, Healing] = {}
        """The handle of each optimizer, by its name in the state."""
        self._own: list[Healing] = []
        try:
            self._attach(engine_of(policy), {"scaler": live_state.scaler(self._state), **attach})
        except BaseException:
            for healing in self._own:
                healing.detach()
            raise
        self.warnings: list[str] = []
        self.on_step: Callable[[], None] = lambda: None
        self._pending: deque[PendingEntry] = deque()
        self._early: deque[StepRecord] = deque(maxlen=MOST_EARLY)
        self._recorders = [
            Recorder(name, self._state, self.healings, self._pending, self._early, self.warnings)
            for name in self.healings
        ]
        healings = self.healings.values()
        self._accumulations = [Accumulation(each, self._after_step) for each in healings]
        self._usual = {*self._accumulations}
        """The accumulations whose optimizers stepped for the last batch; at first all."""
        self._observed = False
        """Whether a loss was observed since the last step of any optimizer."""
        self._unpolled = 0.0  # steps before the first call of `take_dispatch`, then -Inf
        self._statistics = BatchStatistics.of(self._state, self.healings)
        self._weights = TorchWeights(self._state, self.healings, self._accumulations)
        self._sample: WeightSample | None = None  # until `keep_weight_sample`
        self.copy_weights, self.losses_of = self._weights.copy, self._weights.losses_of
        modules = [value for value in self._state.values() if isinstance(value, nn.Module)]
        for healing in healings:
            healing.healed_step.measurer.use_order_of(modules)
        scaler = live_state.scaler(self._state)
        self.window = self._window = GradientWindow(
            self._accumulations, self._statistics, scaler, modules
        )
        optimizers = {name: each.optimizer for name, each in self.healings.items()}
        self._structure = StructureWatch(self._state, optimizers)
        self._added_groups = AddedGroups(self._state, optimizers)
        self._ranks: Ranks | None = None

    @property
    def live(self) -> Mapping[str, Any]:
        """The mapping that the user passed."""
        return self._given

    # -- signals from the loop ------------------------------------------------------------------

    def observe(
        self, loss: Tensor | float, optimizer: str | Optimizer | None = None, *, weight: float = 1.0
    ) -> None:
        """Reports a loss, by default to all optimizers. See `Healing.observe`."""
        self._observed = True
        kind = loss.device.type if isinstance(loss, Tensor) else "cpu"
        mixed = torch.is_autocast_enabled(kind)
        self._weights.autocast = (kind, torch.get_autocast_dtype(kind)) if mixed else None
        for healing in self._healings_of(optimizer):
            healing.observe(loss, weight=weight)

    def observe_eval(
        self, eval_loss: Tensor | float, optimizer: str | Optimizer | None = None
    ) -> None:
        """Reports the loss of an evaluation. See `Healing.observe_eval`."""
        for healing in self._healings_of(optimizer):
            healing.observe_eval(eval_loss)

    # -- steps ----------------------------------------------------------------------------------

    def take_dispatch(self) -> PendingStep | None:
        """The steps judged since the last call, or None. No host sync."""
        for healing in self.healings.values():
            healing.judge_dropped()
        self._unpolled = -math.inf
        if not any(each.in_progress for each in self._accumulations):
            for statistics in self._statistics:
                statistics.keep_written()
        entries, early = [*self._pending], [*self._early]
        self._pending.clear()
        self._early.clear()
        # Once each of several optimizers has stepped, remaining gradients and losses are
        # by-products: a GAN's generator loss also has gradients in the discriminator.
        all_stepped = all(accumulation.stepped for accumulation in self._accumulations)
        all_stepped &= len(self._accumulations) > 1
        self._usual = {each for each in self._accumulations if each.stepped} or self._usual
        for accumulation in self._accumulations:
            accumulation.idle += bool(entries) and not accumulation.stepped
            accumulation.stepped = False
            if all_stepped:
                accumulation.drop_by_products()
        if not entries:
            # A loop that leaves out a batch with NaN itself has no backward pass for its loss.
            left_out = not any(each.reached_since_any_step for each in self._accumulations)
            for healing in self.healings.values() if left_out else ():
                loss = healing.healed_step.measurer.losses.mean()
                if loss is not None and not bool(loss.isfinite()):
                    healing.drop_losses()
            return None
        return PendingStep(entries, early)

    def pending_steps(self) -> int:
        """See `Driver.pending_steps`."""
        return -(-len(self._pending) // len(self.healings))

    def request_vote(self) -> None:
        """Requests a vote in the all_reduce of each optimizer that all ranks step together."""
        everyone = len(self._members)
        for healing in self.healings.values():
            all_reduce = healing.healed_step.all_reduce
            all_reduce.requests_vote = all_reduce.ranks.world == everyone

    def expect_change(self) -> None:
        """Opens every engine's grace window at its next step."""
        for healing in self.healings.values():
            healing.expect_change()
        for statistics in self._statistics:
            statistics.end(False)

    # -- the state ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state as the user passed it."""
        return dict(self._state)

    def engines(self) -> dict[str, dict[str, Any]]:
        """Optimizer name -> state of its engine, JSON-safe. A sync on an accelerator."""
        return {name: healing.state_dict() for name, healing in self.healings.items()}

    def load(
        self,
        state: Mapping[str, Any] | None,
        engines: Mapping[str, Mapping[str, Any]] = {},
        *,
        reset_moments: bool = False,
    ) -> None:
        """See `Driver.load`. A new state drops gradients and losses since the last step."""
        check_engines(engines, self.healings)
        for name, data in engines.items():
            self.healings[name].live_engine.parse(data)
        if state is not None:
            apply(self._state, state)
            self._after_load()
        for healing in self.healings.values() if reset_moments else ():
            reset_moments_of(healing.optimizer)
        steps = {name: self.healings[name].live_engine.state.step for name in engines}
        for name, data in engines.items():
            # A state that only limits something is of the same step, so what the program has
            # reported for its next step still holds.
            healing = self.healings[name]
            healing.live_engine.load(data, rollback=False)
            healing.healed_step.on_state_loaded(keeps_signals=state is None)
        for recorder in self._recorders:
            # A state that only limits something has the same step, whose record may be unread.
            recorder.restart(unless_at=None if state is not None else steps.get(recorder.name))
        self._pending.clear()
        self._early.clear()

    def structure_changes(self) -> list[str]:
        """See `Driver.structure_changes`. The hooks move to the parameters that are there now."""
        changes = self._structure.changes()
        if changes:
            for accumulation in self._accumulations:
                accumulation.on_new_structure()
            self._statistics[:] = BatchStatistics.of(self._state, self.healings)
        return changes

    def load_common(self, saved: CommonState) -> None:
        """See `Driver.load_common`."""
        load_common(self._state, saved)
        self._after_load()

    def param_groups(self) -> dict[str, list[list[str]]]:
        """See `Driver.param_groups`."""
        healings = self.healings.items()
        return group_names(self._state, {name: each.optimizer for name, each in healings})

    def add_param_groups(self, groups: Mapping[str, list[list[str]]]) -> list[str]:
        """See `Driver.add_param_groups`."""
        return self._added_groups.add(groups)

    def moments_obstacle(self) -> str:
        """See `Driver.moments_obstacle`."""
        obstacles = (moments_obstacle(h.optimizer) for h in self.healings.values())
        return next(filter(None, obstacles), "")

    def may_save(self, patience: int | None = None) -> bool:
        """See `Driver.may_save`. False while any optimizer has gradients that no step has used.

        Gradients of an optimizer that has not stepped for `patience` steps of the others are
        by-products of their losses (a frozen discriminator, the first stage of a fine-tuning).
        They need no checkpoint if no loss and no backward pass follows the last step.
        """
        if any(attribute(item, "mid_accumulation") for item in self._state.values()):
            return False
        pending = [accumulation for accumulation in self._accumulations if accumulation.in_progress]
        begun = self._observed or any(e.reached_since_any_step for e in self._accumulations)
        if patience is not None and not begun:
            pending = [accumulation for accumulation in pending if accumulation.idle < patience]
        return not pending

    def is_interrupted(self) -> bool:
        """See `Driver.is_interrupted`. Also if fewer optimizers stepped than for the last batch."""
        in_update = any(healing.healed_step.in_update for healing in self.healings.values())
        stepped = {each for each in self._accumulations if each.stepped}
        return in_update or (bool(stepped) and stepped < self._usual)

    def undo_window(self) -> str:
        """Restores batch statistics, and reshards parameters that FSDP2 has gathered."""
        for statistics in self._statistics:
            statistics.end(True)
        self._weights.reshard()
        return ""

    # -- weights and numbers --------------------------------------------------------------------

    def keep_weight_sample(self) -> None:
        """See `Driver.keep_weight_sample`."""
        if self._sample is None:
            self._sample = WeightSample(self._state, self.healings)
        self._sample.keep()

    def replaced_weights(self) -> list[str]:
        """See `Driver.replaced_weights`."""
        return [] if self._sample is None else self._sample.changed()

    def nonfinite_weights(self) -> list[str]:
        """See `Driver.nonfinite_weights`; of DTensors on all ranks. One sync per device."""
        params = [p for h in self.healings.values() for p in gradients.parameters(h.optimizer)]
        norms = gradients.whole_norms(gradients.norms(params), params)
        if bool(gradients.total_norm(norms, params[0].device).isfinite()):
            return []
        found = [p for p, norm in zip(params, norms, strict=True) if not norm.isfinite()]
        return live_state.parameter_names(self._state, found)

    def memory(self) -> dict[str, int]:
        """See `Driver.memory`."""

        def size(values: Iterable[Any]) -> int:
            return sum(gradients.local_part(t).nbytes for t in values if isinstance(t, Tensor))

        optimizers = [healing.optimizer for healing in self.healings.values()]
        params = {p for optimizer in optimizers for p in gradients.parameters(optimizer)}
        for value in self._state.values():  # with frozen parameters
            params.update(value.parameters() if isinstance(value, nn.Module) else ())
        moments = (m for each in optimizers for s in each.state.values() for m in s.values())
        owners = {"parameters": size(params), "gradients": size(p.grad for p in params)}
        owners["optimizer state"] = size(moments)
        if torch.cuda.is_initialized():
            owners["activations"] = max(0, torch.cuda.memory_allocated() - sum(owners.values()))
        return owners

    def memory_profiles(self) -> dict[str, bytes]:
        """CUDA's summary, and its snapshot if the program records the history of allocations."""
        if not torch.cuda.is_initialized():
            return {}
        profiles = {".txt": torch.cuda.memory_summary().encode()}
        snapshot = torch.cuda.memory._snapshot()
        if any(snapshot.get("device_traces", ())):
            profiles[".pickle"] = pickle.dumps(snapshot)  # for https://pytorch.org/memory_viz
        return profiles

    def settings(self) -> dict[str, Any]:
        """See `Driver.settings`."""
        params = [p for h in self.healings.values() for p in gradients.parameters(h.optimizer)]
        has_stepped = any(healing.optimizer.state for healing in self.healings.values())
        return {
            **live_state.hyperparameters(self._state),
            "precision": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params})),
            WEIGHTS: self._weights.digest() + STEPPED * has_stepped,
        }

    def learning_rates(self) -> dict[str, float | None]:
        """The largest rate of each optimizer's groups, as its engine reads. A sync for a tensor."""
        groups = {name: healing.optimizer.param_groups for name, healing in self.healings.items()}
        return {
            name: max((float(g["lr"]) for g in each if g.get("lr") is not None), default=None)
            for name, each in groups.items()
        }

    def trained_rates(self) -> dict[str, float | None]:
        """See `Driver.trained_rates`."""
        found = self.learning_rates()
        for name, healing in self.healings.items():
            numbers = healing.healed_step.numbers
            if numbers is not None and numbers.rate is not None:
                found[name] = numbers.rate
        return found

    def watch_numbers(self) -> None:
        """See `Driver.watch_numbers`."""
        for healing in self.healings.values():
            if healing.healed_step.numbers is None:
                healing.healed_step.numbers = OptimizerNumbers(healing.optimizer)

    def numbers(self) -> dict[str, NumberRange]:
        """See `Driver.numbers`. No sync: tensors on an accelerator are not read."""
        return {
            f"{name}{place}": each
            for name, healing in self.healings.items()
            if (numbers := healing.healed_step.numbers) is not None
            for place, each in numbers.ranges().items()
        }

    def suspect_numbers(self) -> list[str]:
        """See `Driver.suspect_numbers`. A scheduler may have changed the rates since the step."""
        rates = {rate for recorder in self._recorders for rate in recorder.bad_rates}
        return [f"the learning rate is {rate}" for rate in sorted(rates)]

    def hold_numbers(self, ranges: Mapping[str, NumberRange]) -> None:
        """See `Driver.hold_numbers`. In observe mode the numbers are only read.

        A step of which `torch.compile` has made a graph is compiled again when a number changes.
        """
        if ranges:
            self.watch_numbers()
        for name, healing in self.healings.items():
            numbers = healing.healed_step.numbers
            if numbers is None:
                continue
            own = {n: each for n, each in ranges.items() if n.startswith(name)}
            numbers.hold({n.removeprefix(name): each for n, each in own.items()})

    # -- the run --------------------------------------------------------------------------------

    def missing_moments(self) -> tuple[int, int] | None:
        """See `Driver.missing_moments`. torch creates moments at the first step."""
        return missing_moments(self.state())

    def store(self, where: Any) -> CheckpointStore:
        """A `MemoryStore`, or a `DCPStore` with copies in memory. Every rank has to call it."""
        if where is None:
            return MemoryStore()
        return DCPStore(where, in_memory=IN_MEMORY, ranks=self._new_ranks())

    def ranks(self) -> Ranks:
        """The ranks that step together.

        The first call creates a gloo group, so all of these ranks have to call it.
        """
        if self._ranks is None:
            self._ranks = self._new_ranks()
        return self._ranks

    def _new_ranks(self) -> Ranks:
        return GlooRanks(members=self._members) if len(self._members) > 1 else Alone()

    def close(self) -> None:
        """Removes hooks and handles, but keeps the handles of an earlier `attach`."""
        for part in (self._structure, self._added_groups, self._window, *self._accumulations):
            part.close()
        for healing in self.healings.values():
            step = healing.healed_step
            step.on_judged = step.on_ended = step.on_step = step.numbers = None
        for healing in self._own:
            healing.detach()

    def _after_load(self) -> None:
        """Drops gradients and signals since the last step, which belong to the earlier state."""
        if self._sample is not None:
            self._sample.keep()
        for accumulation in self._accumulations:
            accumulation.clear(used=False)
            accumulation.healing.healed_step.measurer.clear()
        for statistics in self._statistics:
            statistics.save()

    def _after_step(self) -> None:
        self._observed = False
        for accumulation in self._accumulations:
            accumulation.reached_since_any_step = False
        self._unpolled += 1
        if self._unpolled == WITHOUT_POLL:
            console.warning(
                f"{WITHOUT_POLL} steps, but neither healer.batches(loader) nor healer.after_step() "
                "was called: without them the Healer cannot save, roll back or stop the run; write "
                "`for batch in healer.batches(loader)`"
            )
        self.on_step()

    def _attach(self, engine: Any, options: dict[str, Any]) -> None:
        for name, optimizer in live_state.optimizers(self._state).items():
            healing = healing_of(optimizer)
            if healing is None:
                attach_with = getattr(self._state[name], "attach_with", None)  # from a trainer
                attach_function = attach_with or partial(attach_to, self._state[name])
                healing = attach_function(engine, **options)
                self._own.append(healing)
            elif healing.healed_step.on_judged is not None:
                raise AttachError(
                    f'"{name}" belongs to a Healer that is still open: leave its `with` block, or '
                    "delete the object"
                )
            elif differ := config_differences(healing.engine.config, engine.config):
                raise AttachError(
                    f'"{name}" is healed already under another policy than that of the Healer '
                    f"({first_of(differ, 5, '; ')}): detach() its handle, or attach with the "
                    "policy of the Healer"
                )
            self.healings[name] = healing

    @property
    def _members(self) -> list[int]:
        """Default-group numbers of the ranks that step together; empty for this rank alone.

        The longest list of any optimizer, because other optimizers may have fewer of the ranks.
        """
        return max(
            (each.healed_step.all_reduce.ranks.members for each in self.healings.values()), key=len
        )

    def _healings_of(self, optimizer: str | Optimizer | None) -> list[Healing]:
        if optimizer is None:
            return list(self.healings.values())
        for name, healing in self.healings.items():
            if optimizer is healing.optimizer or optimizer is self._state[name]:
                return [healing]
        if isinstance(optimizer, str) and optimizer in self.healings:
            return [self.healings[optimizer]]
        raise AttachError(
            f"there is no optimizer {optimizer!r:.60} in the state: pass one of "
            f"{', '.join(self.healings)}, by name or as the object"
        )
