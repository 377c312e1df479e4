"""Measures, judges and enforces around `optimizer.step()`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.enforcer import (
    CutsOnDevice,
    Enforcer,
    moments_obstacle,
    reset_moments,
)
from healcore.torch.engines import DeviceOrder, HostOrder, LiveEngine
from healcore.torch.errors import ParametersChangedError
from healcore.torch.incident_log import IncidentLog
from healcore.torch.measurement import Measurer, StepNorms
from healcore.torch.signal_allreduce import SignalAllReduce
from healcore.torch.skipped_step import ClosureUndo, StepSkipped

_OPTIMIZER_FILE = os.path.join("torch", "optim", "optimizer.py")


class StepHooks:
    """The two step hooks of one optimizer.

    They change learning rates, gradients, `grad_scale` and `found_inf` for one step, and restore
    them after it.

    Attributes:
        handles: handles of the hooks; empty after `detach`.
        last_norms: gradient norms of the last judged step.
        on_judged: called at every judged step, before the optimizer's update.
        on_ended: called after each judged step with whether the step was skipped: a bool, or a 0-d
            float32 of exactly 0 or 1. In observe mode always False.
        hold_numbers: called before each step to replace unusual numbers of the parameter groups.
        grows: whether per-tensor clipping starts a history for added parameters, instead of raising
            `ParametersChangedError`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        live_engine: LiveEngine,
        measurer: Measurer,
        enforcer: Enforcer,
        all_reduce: SignalAllReduce,
    ) -> None:
        self.optimizer = optimizer
        self.live_engine = live_engine
        self.measurer = measurer
        self.enforcer = enforcer
        self.all_reduce = all_reduce
        self._engine = live_engine.engine
        self._groups = len(gradients.parameters(optimizer))
        self.open_step = OpenStep()
        self._undo = ClosureUndo(optimizer)
        self._judged = self._turned_nonfinite = False
        self._changes = False
        self._order: HostOrder | None = None
        self._skipped: bool | Tensor | None = None
        # L-BFGS reads its state before the closure, so a reset would not take effect.
        self._resets_moments = (
            self._engine.resets_moments
            and not moments_obstacle(optimizer)
            and not self._undo.reevaluates
        )
        self._cuts = CutsOnDevice()
        self._resets_next = False
        """Whether the next step that is not skipped resets the moments. The step that cuts the
        learning rate does not reset them, because its gradient is damaged."""
        self.incident_log = IncidentLog(
            type(optimizer).__name__, self._engine, enforcer.learning_rate
        )
        self.incident_log.resets_moments = self._resets_moments
        self.last_norms: StepNorms | None = None
        self.on_judged: Callable[[StepNorms], None] | None = None
        self.on_ended: Callable[[bool | Tensor], None] | None = None
        self.hold_numbers: Callable[[Enforcer], object] = lambda enforcer: None
        self.grows = False

        # Dynamo drops an ordinary hook's writes to the optimizer. At a disabled hook it breaks the
        # graph, and then guards on the attributes that the hook has written.
        self.before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        self.handles = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(after),
        ]

    def judge_dropped(self) -> None:
        """See `Healing.judge_dropped`."""
        if self.measurer.dropped.found():
            self._judge_dropped()

    @torch.no_grad()
    def _judge_dropped(self) -> None:
        alone = self.all_reduce.world == 1
        measured = self.measurer.measure_dropped(self._groups, alone=alone)
        if measured is None:
            return
        self.live_engine.step(measured)
        self._report(StepNorms([], [], None))

    def on_state_loaded(self) -> None:
        """Call it after the engine's state is replaced."""
        self.measurer.clear()
        self.incident_log.answered()
        self._cuts, self._resets_next = CutsOnDevice(), False
        if self._undo.reevaluates and self._engine.mode != "observe":
            # L-BFGS uses the multiplier of the previous step, see `_before`.
            scale = float(self.live_engine.state.lr.scale)
            self._order = HostOrder(skip=False, grad_scale=1.0, lr_scale=scale, group_scale=None)

    @property
    def in_update(self) -> bool:
        """See `Healing.in_update`."""
        return self.open_step.is_open and self._changes

    def detach(self) -> None:
        """See `Healing.detach`."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.on_judged = self.on_ended = None
        self.restore()
        self.open_step.clear()
        self.measurer.clear()

    # -- around the step ------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The pre-hook: judges the step, or wraps a closure to judge after its backward pass."""
        has_raised = self.open_step.is_open  # unless this step is nested
        if not self.open_step.enter():
            return None  # step() of a subclass called super().step()
        self.measurer.dropped.find_scaler(self.open_step.frame)
        if has_raised:  # a step that raised had no post-hook
            self.restore()
        self.hold_numbers(self.enforcer)
        self._judged = self._turned_nonfinite = False
        self._skipped = None
        last, self._order = self._order, None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._changes = closure is not None
        if closure is None:
            self._judge()
            return None
        self.enforcer.step_skipper.watch()
        self._undo.record()
        if self._undo.reevaluates and last is not None and last.lr_scale != 1.0:
            # L-BFGS reads its rate before its closure, so it gets the previous multiplier.
            self.enforcer.scale_lr(last.lr_scale)
        wrapped = torch.compiler.disable(self._wrapped(closure))
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The post-hook: restores everything that was changed for the step."""
        if not self.open_step.leave():
            return
        if self._turned_nonfinite or (self._order is not None and self._order.skip):
            self._undo.restore()
        self.restore()
        self.measurer.clear()  # losses of a closure's later evaluations
        if self._skipped is not None and self.on_ended is not None:
            self.on_ended(self._turned_nonfinite or self._skipped)

    def restore(self) -> None:
        """Restores what was changed on the optimizer for a step."""
        self.enforcer.restore()
        self._undo.clear()

    def _wrapped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps the user's closure: judges its first evaluation, and checks later ones."""

        def evaluate() -> Any:
            self._undo.before_evaluation()
            loss = closure()
            if self._judged:
                self._check_again()
            else:
                if loss is not None and not self.measurer.has_loss:
                    self.measurer.add_loss(loss, "the closure's loss")
                self._judge()
            if self.enforcer.step_skipper.can_end and self._undo.is_complete:
                self.open_step.unwind()
                raise StepSkipped(loss)
            return loss

        return evaluate

    @torch.no_grad()
    def _check_again(self) -> None:
        """Clips a step's later evaluation by the same factor; skips the step if not finite."""
        order = self._order
        if order is None:
            return
        all_parameters = gradients.parameters(self.optimizer)
        grads = [p.grad for p in all_parameters if p.grad is not None]
        if order.skip or self._turned_nonfinite:
            self.enforcer.skip(all_parameters)
        elif grads and not self.measurer.all_finite(grads):
            self._turned_nonfinite = True
            self.enforcer.skip(all_parameters)
        else:
            self.enforcer.clip(all_parameters, order)

    @torch.no_grad()
    def _judge(self) -> None:
        """Measures the step, runs the engine and enforces its order, if there are gradients."""
        self._judged = True
        all_parameters = gradients.parameters(self.optimizer)
        params = [p for p in all_parameters if p.grad is not None]
        has_ranks = self.all_reduce.world > 1
        if not params and not has_ranks:
            self.measurer.clear()
            return
        if self.grows and len(all_parameters) > self._groups:
            self._groups = len(all_parameters)
            self.live_engine.grow(self._groups)
        if self._engine.per_tensor and len(all_parameters) != self._groups:
            raise ParametersChangedError(
                f"the optimizer had {self._groups} parameters at attach, "
                f"now {len(all_parameters)}, and this policy has a clipping history for each: "
                "detach() and attach again"
            )
        divisor, found_inf = self.enforcer.amp_flags()
        measured = self.measurer.measure(
            all_parameters, grad_divisor=divisor, found_inf=found_inf, ranks=self.all_reduce.ranks
        )
        self.measurer.clear()
        own_loss = None
        if has_ranks:
            state_init = measured.state_init and _are_zero(self.measurer.tensor_norms, params)
            if state_init:  # perhaps on this rank only: an all_reduce would never return
                return
            if measured.loss is not None:
                own_loss = measured.loss.clone()  # the next loss overwrites it
            measured = self.all_reduce.reduce(measured, self.live_engine.decision)
        if measured.grad_norm is None:
            return
        measured = self.measurer.mark_overflow(measured)
        self._changes = True  # a collective that raised before this line changed nothing
        order = self.live_engine.step(measured)
        self._skipped = False
        if self._resets_next and not (isinstance(order, HostOrder) and order.skip):
            reset_moments(self.optimizer)
            self._resets_next = False
        if self._engine.mode != "observe":
            if isinstance(order, DeviceOrder) and not self.enforcer.needs_host(params):
                self.enforcer.enforce_on_device(all_parameters, params, order)
                self._skipped = order.found_inf
                cut = order.cut if self._resets_moments else None
                self._resets_next = cut is not None and self._cuts.add(cut)
            else:
                order = order.to_host() if isinstance(order, DeviceOrder) else order
                self._order, self._skipped = order, order.skip
                if self._undo.reevaluates:  # too late for this step, see `_before`
                    order = order._replace(lr_scale=1.0)
                self.enforcer.enforce(all_parameters, order, measured.grad_divisor)
                self._resets_next |= self._resets_moments and order.cut
        norms = self.measurer.tensor_norms
        self.last_norms = StepNorms(params, norms, measured.grad_divisor, own_loss)
        self._report(self.last_norms)

    def _report(self, norms: StepNorms) -> None:
        """Reports a judged step to the Healer, or to the log if there is no Healer."""
        if self.on_judged is not None:
            self.on_judged(norms)
        else:
            self.incident_log.enabled = self.all_reduce.ranks.is_first
            self.incident_log.judged(self.live_engine, has_seen_loss="loss" in self.measurer.seen)


def _are_zero(norms: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Whether all gradients are 0, for DTensors on all ranks: this rank may have no elements.

    A sync, but called only for a fresh optimizer with learning rate 0.
    """
    return all(not norm.cpu().numpy() for norm in gradients.whole_norms(norms, params))


class OpenStep:
    """Distinguishes a nested step from the next step, by the frame of the running `step()`.

    `super().step()` in a subclass fires the hooks twice; a step that raises fires no post-hook. A
    depth counter would count every step after an exception as nested, and healing would end
    silently.
    """

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        """Frame of torch's hook wrapper around the step, or None between steps."""
        self._nested = 0

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended, or ended in an exception."""
        return self.frame is not None

    def enter(self) -> bool:
        """Call it from the pre-hook. Returns False for a nested step."""
        if self.frame is not None and self._on_stack(self.frame):
            self._nested += 1
            return False
        self.frame = _optimizer_frame()
        self._nested = 0
        return True

    def leave(self) -> bool:
        """Call it from the post-hook. Returns False for a nested step."""
        if self._nested:
            self._nested -= 1
            return False
        self.frame = None
        return True

    def unwind(self) -> None:
        """Call it before an exception that ends the nested steps without their post-hooks."""
        self._nested = 0

    def clear(self) -> None:
        """Drops the frame, which keeps its locals alive."""
        self.frame, self._nested = None, 0

    @staticmethod
    def _on_stack(frame: FrameType) -> bool:
        at: FrameType | None = sys._getframe(1)
        while at is not None:
            if at is frame:
                return True
            at = at.f_back
        return False


def _optimizer_frame() -> FrameType:
    """The nearest frame of torch's hook wrapper, which outlives both hooks."""
    at: FrameType | None = sys._getframe(2)
    while at is not None:
        if at.f_code.co_filename.endswith(_OPTIMIZER_FILE):
            return at
        at = at.f_back
    return sys._getframe(3)
