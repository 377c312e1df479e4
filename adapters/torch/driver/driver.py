"""`TorchDriver`: gives the Healer access to a training run in torch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore import console
from healcore.core.errors import AttachError
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.driver import check_engines
from healcore.runtime.healthy_range import HealthyRange
from healcore.runtime.store import CheckpointStore
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.saved import IN_MEMORY
from healcore.runtime.store.values import attribute
from healcore.torch import gradients, live_state
from healcore.torch.attachment import Healing, healing_of
from healcore.torch.attachment import attach as attach_to
from healcore.torch.driver.batch_statistics import BatchStatistics
from healcore.torch.driver.gradient_window import Accumulation, GradientWindow
from healcore.torch.driver.loss_evaluation import LossEvaluation
from healcore.torch.driver.pending_step import MOST_PENDING, PendingEntry, PendingStep, Recorder
from healcore.torch.enforcer import moments_obstacle, numbers_of, reset_moments
from healcore.torch.incident_log import WITHOUT_LOSS
from healcore.torch.live_state import optimizers, parameter_names
from healcore.torch.store import DCPStore, MemoryStore, apply
from healcore.torch.store.gloo import GlooRanks, initialized

WITHOUT_POLL = 100
"""Steps before the first poll after which a warning is logged."""


class TorchDriver:
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

    def __init__(
        self,
        state: Mapping[str, Any],
        policy: PolicyLike = "default",
        attach: Mapping[str, Any] = {},
    ) -> None:
        self._state = live_state.checked(state)
        self.healings: dict[str, Healing] = {}
        """The handle of each optimizer, by its name in the state."""
        self._own: list[Healing] = []
        try:
            self._attach(engine_of(policy), {"scaler": live_state.scaler(self._state), **attach})
        except BaseException:
            self._detach()
            raise
        names = partial(parameter_names, self._state)
        self._pending: deque[PendingEntry] = deque(maxlen=MOST_PENDING)
        self.warnings: list[str] = []
        self._recorders = [
            Recorder(name, healing, names, self._pending.append, self.warnings.append)
            for name, healing in self.healings.items()
        ]
        self._accumulations = [Accumulation(healing) for healing in self.healings.values()]
        on_step = weakref.WeakMethod(self._on_step)  # hooks of tensors are not collected in cycles
        for accumulation in self._accumulations:
            accumulation.on_step = lambda: (call := on_step()) and call()
        self._call_on_step: Callable[[], None] = lambda: None
        self._observed = False
        """Whether a loss was observed since the last step of any optimizer."""
        self._statistics = BatchStatistics(self._state, self.healings)
        self._evaluation = LossEvaluation(self._state, self.healings, self._accumulations)
        self.weights_digest = self._evaluation.weights_digest
        self.copy_weights = self._evaluation.copy_weights
        self.losses_of = self._evaluation.losses_of
        self._windows: list[GradientWindow] = []
        self._ranks: Ranks | None = None
        self._wants_vote = False
        self._unpolled: int | None = 0
        """Number of steps before the first poll, or None afterwards."""
        self._polled_steps = 0

    # -- signals from the loop ------------------------------------------------------------------

    def observe(
        self,
        loss: Tensor | float,
        optimizer: str | Optimizer | None = None,
        *,
        weight: float = 1.0,
    ) -> None:
        """Reports a loss, by default to all optimizers. See `Healing.observe`."""
        self._observed = True
        for healing in self._healings_of(optimizer):
            healing.observe(loss, weight=weight)

    def observe_eval(
        self, eval_loss: Tensor | float, optimizer: str | Optimizer | None = None
    ) -> None:
        """Reports the loss of an evaluation. See `Healing.observe_eval`."""
        for healing in self._healings_of(optimizer):
            healing.observe_eval(eval_loss)

    # -- the protocol ---------------------------------------------------------------------------

    def items(self) -> dict[str, Any]:
        """The state as the user passed it."""
        return dict(self._state)

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Loads a restored state. Drops gradients and losses since the last step."""
        optimizers = [h.optimizer for h in self.healings.values()]
        restores = [live_state.keep_tensor_hyperparameters(each) for each in optimizers]
        try:
            apply(self._state, restored)
        finally:  # after an error an older checkpoint may be loaded
            for restore in restores:
                restore()
        for accumulation in self._accumulations:
            accumulation.clear()
        for healing in self.healings.values():
            healing.discard()
        self._statistics.save()

    def reset_moments(self) -> None:
        """See `Driver.reset_moments`."""
        for healing in self.healings.values():
            reset_moments(healing.optimizer)

    def moments_obstacle(self) -> str:
        """See `Driver.moments_obstacle`."""
        return next(
            filter(None, (moments_obstacle(h.optimizer) for h in self.healings.values())), ""
        )

    def healing(self) -> dict[str, dict[str, Any]]:
        """Optimizer name -> state of its engine, JSON-safe. A sync on an accelerator."""
        return {name: healing.state_dict() for name, healing in self.healings.items()}

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces engine states. Drops steps that `poll_step` has not returned."""
        check_engines(engines, self.healings)
        for name, data in engines.items():
            self.healings[name].live_engine.parse(data)
        for recorder in self._recorders:
            if recorder.name in engines:
                recorder.healing.load_state_dict(engines[recorder.name])
            recorder.restart()
        self._pending.clear()

    def poll_step(self) -> PendingStep | None:
        """The steps judged since the last call, or None. No host sync."""
        for healing in self.healings.values():
            healing.judge_dropped()
        # Once each of several optimizers has stepped, remaining gradients and losses are
        # by-products: a GAN's generator loss also has gradients in the discriminator.
        several = len(self._accumulations) > 1
        all_stepped = several and all(each.stepped for each in self._accumulations)
        entries, self._unpolled = [*self._pending], None
        self._pending.clear()
        for each in self._accumulations:
            each.idle += bool(entries) and not each.stepped
            each.stepped = False
            if all_stepped:
                each.drop_by_products()
        if not entries:
            return None
        step = PendingStep(entries, self._ranks_to_compare, lambda: self._wants_vote)
        self._polled_steps += 1
        if self._polled_steps == WITHOUT_LOSS:
            self._warn_of_missing_losses()
        return step

    def has_stepped(self) -> bool:
        """See `Driver.has_stepped`."""
        return bool(self._pending)

    def on_step(self, call: Callable[[], None]) -> None:
        """Calls `call` from the hook after each `optimizer.step()` of any optimizer."""
        self._call_on_step = call

    def request_vote(self, wanted: bool) -> bool:
        """Requests a vote in the all_reduce of each optimizer that all ranks step together."""
        self._wants_vote, everyone = wanted, len(self._members)
        for healing in self.healings.values():
            all_reduce = healing.hooks.all_reduce
            all_reduce.requests_vote = wanted and all_reduce.world == everyone
        return True

    def may_save(self, patience: int | None = None) -> bool:
        """See `Driver.may_save`. False while any optimizer has gradients that no step has used.

        Gradients of an optimizer that has not stepped for `patience` steps of the others are
        by-products of their losses (a frozen discriminator, the first stage of a fine-tuning).
        They need no checkpoint if no loss and no backward pass follows the last step.
        """
        if any(attribute(item, "mid_accumulation") for item in self._state.values()):
            return False
        pending = [each for each in self._accumulations if each.in_progress]
        if patience is not None and not self._within_a_step:
            pending = [each for each in pending if each.idle < patience]
        return not pending

    def gradient_window(self) -> GradientWindow:
        """The gradients of all optimizers since the last step."""
        window = GradientWindow(
            self._accumulations,
            self._statistics,
            live_state.scaler(self._state),
            [each for each in self._state.values() if isinstance(each, nn.Module)],
        )
        self._windows.append(window)
        return window

    def interrupted(self) -> bool:
        """Whether an update has started and has not ended, or raised."""
        return any(healing.hooks.in_update for healing in self.healings.values())

    def undo_window(self) -> str:
        """Restores batch statistics, and reshards parameters that FSDP2 has gathered."""
        self._statistics.restore()
        self._evaluation.reshard()
        return ""

    def optimizer_reports(self) -> dict[str, object]:
        """Optimizer name -> `Report`."""
        return {name: healing.report() for name, healing in self.healings.items()}

    def hyperparameters(self) -> dict[str, Any]:
        """See `live_state.hyperparameters`."""
        return live_state.hyperparameters(self._state)

    def learning_rate(self) -> float | None:
        """The rate of the first optimizer's first group. A sync if it is a tensor on a device."""
        groups = next(iter(self.healings.values())).optimizer.param_groups
        rate = groups[0].get("lr")
        return None if rate is None else float(rate)

    def numbers(self) -> dict[str, float]:
        """See `Driver.numbers`. No sync: numbers in tensors are left out."""
        healings = self.healings.items()
        each = [numbers_of(name, h.optimizer) for name, h in healings]
        return {name: value for found in each for name, value in found.items()}

    def hold_numbers(self, healthy: Callable[[], Mapping[str, HealthyRange]]) -> None:
        """See `Driver.hold_numbers`."""
        for name, healing in self.healings.items():
            healing.hooks.hold_numbers = lambda enforcer, name=name: enforcer.hold_numbers(
                name, healthy()
            )

    def expect_change(self) -> None:
        """Opens every engine's grace window at its next step."""
        for healing in self.healings.values():
            healing.expect_change()
        self._statistics.save_finite()  # loaded weights have statistics of their own

    def finite(self) -> bool:
        """Whether all parameters are finite, for DTensors on all ranks. One sync per device."""
        params = [p for h in self.healings.values() for p in gradients.parameters(h.optimizer)]
        each = gradients.whole_norms(gradients.norms(params), params)
        norm = gradients.total_norm(each, params[0].device)
        return bool(torch.isfinite(norm))

    def nonfinite_weights(self) -> list[str]:
        """See `Driver.nonfinite_weights`."""
        params = [p for h in self.healings.values() for p in gradients.parameters(h.optimizer)]
        norms = gradients.whole_norms(gradients.norms(params), params)
        found = [p for p, norm in zip(params, norms, strict=True) if not norm.isfinite()]
        return parameter_names(self._state, found)

    def store(self, where: Any) -> CheckpointStore:
        """A `MemoryStore`, or a `DCPStore` with copies in memory. Every rank has to call it."""
        if where is None:
            return MemoryStore()
        ranks = GlooRanks(members=self._members) if initialized() else None
        return DCPStore(where, in_memory=IN_MEMORY, ranks=ranks)

    def ranks(self) -> Ranks:
        """The ranks that step together, or all ranks if the engines decide alone.

        The first call creates a gloo group, so all of these ranks have to call it.
        """
        if self._ranks is None:
            self._ranks = GlooRanks(members=self._members) if initialized() else Alone()
        return self._ranks

    def generators(self) -> live_state.RngState:
        """The global random generators of CPU and CUDA."""
        return live_state.RngState()

    def close(self) -> None:
        """Removes hooks and handles, but keeps the handles of an earlier `attach`."""
        self._statistics.close()
        for window in self._windows:
            window.close()
        for accumulation in self._accumulations:
            accumulation.close()
        for healing in self.healings.values():
            healing.hooks.on_judged = None
        self._detach()

    # -- internal -------------------------------------------------------------------------------

    @property
    def _within_a_step(self) -> bool:
        """Whether a loss was observed or a backward pass has run since the last step."""
        return self._observed or any(each.reached_since_any_step for each in self._accumulations)

    def _on_step(self) -> None:
        self._observed = False
        for each in self._accumulations:
            each.reached_since_any_step = False
        if self._unpolled is not None:
            self._unpolled += 1
            if self._unpolled == WITHOUT_POLL:
                console.warning(
                    f"{WITHOUT_POLL} steps, but neither healer.batches(loader) nor "
                    "healer.after_step() was called: without them the Healer cannot save, roll "
                    "back or stop the run; take the batches from `for batch in "
                    "healer.batches(loader)`, or call healer.after_step() after each "
                    "optimizer.step()"
                )
        self._call_on_step()

    def _attach(self, engine: Any, options: dict[str, Any]) -> None:
        for name, optimizer in optimizers(self._state).items():
            healing = healing_of(optimizer)
            if healing is None:
                attach_with = getattr(self._state[name], "attach_with", None)  # from a trainer
                attach_function = attach_with or partial(attach_to, self._state[name])
                healing = attach_function(engine, **options)
                self._own.append(healing)
            elif healing.hooks.on_judged is not None:
                raise AttachError(
                    f'"{name}" belongs to a Healer that is still open: leave its `with` block, or '
                    "delete the object"
                )
            elif repr(healing.engine.config) != repr(engine.config):  # == fails on array configs
                raise AttachError(
                    f'"{name}" is healed already under another policy: detach() its handle, or '
                    "attach with the policy of the Healer"
                )
            self.healings[name] = healing

    @property
    def _members(self) -> list[int]:
        """Default-group numbers of the ranks that step together; empty if the engines decide alone.

        The longest list of any optimizer, because other optimizers may have fewer of the ranks.
        """
        return max(
            (each.hooks.all_reduce.ranks.members for each in self.healings.values()), key=len
        )

    @property
    def _ranks_to_compare(self) -> Ranks | None:
        """The ranks, if there are several and an engine decides alone; else None."""
        if self._ranks is None or self._ranks.world == 1:
            return None
        alone = any(healing.ranks == 1 for healing in self.healings.values())
        return self._ranks if alone else None

    def _detach(self) -> None:
        for healing in self._own:
            healing.detach()

    def _warn_of_missing_losses(self) -> None:
        read = any("loss" in healing.engine.needs for healing in self.healings.values())
        if read and not any(healing.has_seen_loss for healing in self.healings.values()):
            self.warnings.append(
                f"no loss has been observed in {self._polled_steps} steps: call "
                "healer.observe(loss); detectors that read it are inactive"
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
