"""`HealedStep`: heals each step of one optimizer. It measures, guards, steps and restores.

A `StepListener` is called at each step: the driver of a Healer, or `AttachLog` without a Healer.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from healcore.core.decision import Action
from healcore.torch import gradients
from healcore.torch.attach_log import AttachLog
from healcore.torch.live_engine import EnforcedDecision, LiveEngine, PendingRecord
from healcore.torch.measurement import Measurement, Measurer, one_number
from healcore.torch.moments import is_third_party, reset_moments
from healcore.torch.optimizer_numbers import OptimizerNumbers
from healcore.torch.ranks import SignalAllReduce

_NOTHING = EnforcedDecision(skip=False)
"""Changes nothing: in observe mode, and at a step that is not judged."""
_ABSENT = object()


class StepListener(Protocol):
    """Is called at each step of one healed optimizer.

    A healed step has one listener, which decides what becomes of the step's record:

        without a Healer  `AttachLog`, which logs lines
        with a Healer     `FollowedOptimizer` of the driver, which keeps the step for the run
        Lightning         passes every call on to the `FollowedOptimizer`, and clips

    The methods run inside `optimizer.step()`, so none of them may wait for a device. One call of
    `optimizer.step()` makes these calls:

        judged ─► the optimizer's update, unless the step is skipped ─► ended

    A step without gradients is not judged and makes only the last call. A step that a GradScaler
    has dropped is judged later, outside of `optimizer.step()`. A step that raises makes no further
    call.
    """

    def judged(self, measured: Measurement) -> None:
        """Called when the engine has judged a step, before the optimizer's update.

        `HealedStep.live_engine.pending_record()` reads the record of this step.

        Args:
            measured: what this rank has measured, not read on the host yet. Empty for a dropped
                step, and if the norms belong to no single parameter.
        """
        ...

    def ended(self, skipped: bool | Tensor) -> None:
        """Called when a step has ended, after everything was restored.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of exactly 0 or 1 on the
                device. In observe mode, and for a step that was dropped or not judged, False.
        """
        ...


class HealedStep:
    """The healed `step` of one optimizer.

    `step` of the optimizer is replaced. A call of `optimizer.step()` then runs:

        _begin    evaluates a closure, if the program passes one
          _judge    measures: Measurer.measure, SignalAllReduce.reduce with several ranks
                    guards: LiveEngine.step decides; _apply clips, scales the rate
        original  steps: `step` as it was before `attach`, unless the host skips
        _finish   restores what was replaced for the step, reports the step to the listener

    The host skips a step by not calling the original `step`. A fused kernel skips by itself.
    A closure is evaluated before the original `step`, which receives the result.

    Learning rates, held numbers, and the two attributes that fused kernels read are replaced for
    one step, and restored afterwards unless other code has written there.

    Other code may wrap or store `step` before and after the replacement. A learning-rate scheduler
    wraps the function and marks the wrapper, which the replacement keeps. A `step` that was stored
    before bypasses the replacement, which a pre-hook of the optimizer notices. A `step` that was
    stored after the replacement stays callable after `detach`, and calls the original.

    Args:
        optimizer: the optimizer, without a wrapper.
        live_engine: the policy's engine with the state of this run.
        measurer: measures each step of this optimizer.
        all_reduce: reduces the signals over the ranks, and knows these ranks.

    Attributes:
        has_kernel: whether the optimizer can clip and skip inside its fused kernel.
        attached: whether the optimizer's `step` is replaced.
        attach_log: the listener without a Healer. It always logs steps that bypass the replacement.
        listener: called at each step.
        numbers: reads the numbers of the optimizer at every judged step, and names the numbers to
            be replaced for the step. The driver of a Healer sets it, because it costs time.
        in_update: whether a running step may have made a change, as the original `step` does.
            Stays True after the step raised. False while it waits for the other ranks' signals.
        pre_hook: the pre-hook of the optimizer; `attachment.healing_of` finds the `Healing` by it.
        undo_stack: undoes with `detach` what a trainer or wrapper has changed besides `step`.
    """

    may_reset_moments = True
    """Whether the tensors of the moments may be replaced."""

    def __init__(
        self,
        optimizer: Optimizer,
        live_engine: LiveEngine,
        measurer: Measurer,
        all_reduce: SignalAllReduce,
    ) -> None:
        self.optimizer = optimizer
        self.live_engine = live_engine
        self.measurer = measurer
        self.all_reduce = all_reduce
        self.numbers: OptimizerNumbers | None = None
        self.has_kernel = has_kernel(optimizer)
        self.in_update = False
        self._enforced = _NOTHING
        """What is enforced at the step that runs. The host skips if its `skip` is True; a tensor is
        for the fused kernel, and the original `step` is called."""
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """What is replaced for the step, the oldest first: dictionary, key, value for the step, and
        value before or `_ABSENT`."""
        self._grads_are_none = False
        """Whether the last step that was not skipped left every `.grad` None. Then a skipped step
        sets them to None too: the next backward pass would add to NaN."""
        self._resets_moments = bool(
            live_engine.engine.resets_moments
            and self.may_reset_moments
            and not is_third_party(optimizer)
        )
        """Whether a cut of the learning rate resets the moments."""
        self._reset_is_due = False
        """Whether the next step that is not skipped resets the moments."""
        self._unread: deque[PendingRecord] = deque()
        """Records that may order a reset, oldest first. A record of a device is read some steps
        later."""
        self.attach_log = AttachLog(
            optimizer,
            live_engine,
            measurer,
            all_reduce.ranks,
            resets_moments=self._resets_moments,
        )
        self.listener: StepListener = self.attach_log
        self.attached = True
        self.undo_stack = ExitStack()
        self._replace_step()

    # -- one step -------------------------------------------------------------------------------

    def _replace_step(self) -> None:
        """Replaces `step`, and registers the pre-hook. `_restore_step` restores both."""
        optimizer: Any = self.optimizer
        # `step` is usually a method of the class. A wrapper may have set it on the object.
        own_step = vars(optimizer).get("step")
        original = optimizer.step
        # Dynamo must not trace what reads values, or writes to the optimizer.
        disable: Any = torch.compiler.disable
        self.pre_hook = disable(self._check_running)
        begin = disable(self._begin)
        finish = disable(self._finish)

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # A scheduler that was made after the replacement keeps this function after `detach`.
            if not self.attached:
                return original(*args, **kwargs)
            has_ended = False
            try:
                result, args, kwargs = begin(args, kwargs)
                if self._enforced.skip is not True:
                    result = original(*args, **kwargs)
                has_ended = True
            finally:
                finish(has_ended)
            return result

        functools.update_wrapper(step, getattr(original, "__func__", original), updated=())
        replaced = disable(step, recursive=False)
        if hasattr(original, "_wrapped_by_lr_sched"):
            replaced._wrapped_by_lr_sched = True
        # A bound method, because learning-rate schedulers wrap `__func__`.
        replacement = types.MethodType(replaced, optimizer)
        optimizer.step = replacement
        handle = optimizer.register_step_pre_hook(self.pre_hook)

        def restore_step() -> None:
            handle.remove()
            if vars(optimizer).get("step") is replacement:
                del optimizer.step
                if own_step is not None:
                    optimizer.step = own_step

        self._restore_step = restore_step

    def _begin(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Evaluates the closure, judges the step, and enforces the decision.

        Returns:
            The closure's loss or None, which is the result of a skipped step; and the arguments of
            the original `step`.
        """
        self._enforced = _NOTHING
        self.in_update = False
        loss = None
        if not self._creates_state(kwargs):
            if args:
                closure = args[0]
            else:
                closure = kwargs.get("closure")
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                if loss is not None and not self.measurer.losses.weight:
                    self.measurer.losses.add(one_number("the closure's loss", loss))
            self._judge()
            if closure is not None:
                args = (torch.compiler.disable(self._reused(closure, loss)), *args[1:])
                kwargs.pop("closure", None)
        self.in_update = True
        return loss, args, kwargs

    def _creates_state(self, kwargs: Any) -> bool:
        """Whether torch.distributed.checkpoint creates the state of a fresh optimizer.

        It calls `step(closure=None)` at a learning rate of 0 with gradients of 0. No rank judges
        such a step, because other ranks may not take it. A sync in this case only.
        """
        if kwargs.get("closure", 0) is not None or self.optimizer.state:
            return False
        rates = [float(group.get("lr", 1.0)) for group in self.optimizer.param_groups]
        return not any(rates)

    def _reused(self, closure: Callable[[], Any], loss: Any) -> Callable[[], Any]:
        """A closure whose first call returns `loss`, if weights and gradients are still the same.

        Sharpness-aware and schedule-free optimizers move the weights before they evaluate, and
        L-BFGS evaluates again. Further evaluations are clipped by the factor of the step.
        """
        params = gradients.parameters(self.optimizer)
        marks: list[tuple[int, int, int]] | None = _marks(params)

        def evaluate() -> Any:
            nonlocal marks
            is_same = marks == _marks(params)
            marks = None  # only the first call may reuse the loss
            if is_same:
                return loss
            other_loss = closure()
            if not isinstance(self._enforced.skip, Tensor):
                with torch.no_grad():
                    self._clip(params, self._enforced)
            return other_loss

        return evaluate

    # -- measure and guard ----------------------------------------------------------------------

    @torch.no_grad()
    def _judge(self) -> None:
        """Measures the step, runs the engine and enforces its decision, if there are gradients."""
        live = self.live_engine
        parameters = gradients.parameters(self.optimizer)
        # Before the measurement, because the first access of `members` finds who holds which part.
        ranks = self.all_reduce.ranks
        has_ranks = len(ranks.members) > 1
        if not has_ranks and all(p.grad is None for p in parameters):
            return
        if live.engine.per_tensor and len(parameters) != live.tensors:
            live.fit(len(parameters))

        # Measure.
        divisor = self._amp_flag("grad_scale")
        found_inf = self._amp_flag("found_inf")
        measured = self.measurer.measure(parameters, divisor, ranks)
        signals = measured.signals
        if has_ranks:
            signals, found_inf = self.all_reduce.reduce(
                signals, measured.squares, found_inf, live.compared_decision
            )
        if signals.grad_norm is None:
            return  # no rank has a gradient, so there is no step
        self.measurer.eval_loss = float("nan")
        signals, rates = self.measurer.mark_bad_rates(signals)
        signals = self.measurer.overflows.mark(signals, found_inf)
        measured = measured._replace(rates=rates)

        # Guard. A collective that raised before this line has changed nothing.
        self.in_update = True
        enforced = live.step(signals, found_inf)
        if self._reset_is_due and enforced.skip is not True:
            reset_moments(self.optimizer)
            self._reset_is_due = False
        if self.numbers is not None:
            self.numbers.read()
        if live.engine.mode != "observe":
            self._enforce(parameters, measured, enforced)
        self._report(measured)

    def _amp_flag(self, name: str) -> Tensor | None:
        """An attribute that a GradScaler sets on a fused optimizer for one step.

        Args:
            name: "grad_scale", the scale that the gradients still contain; or "found_inf", above 0
                after an overflow.

        Returns:
            0-d float32 on the device of the first parameter, or None if it is not set.
        """
        value = vars(self.optimizer).get(name)
        if isinstance(value, Tensor):
            return gradients.to_device(value, self.measurer.home, torch.float32)
        return None

    def _enforce(
        self, parameters: Sequence[Tensor], measured: Measurement, enforced: EnforcedDecision
    ) -> None:
        """Completes the engine's decision, and enforces it."""
        if self.numbers is not None:
            # First, because `_needs_host` depends on the momentum of the step.
            for group, entry, value in self.numbers.replacements():
                self._replace(group, entry, value)
        if isinstance(enforced.skip, Tensor) and self._needs_host(measured.params):
            enforced = enforced.to_host()
        if self.live_engine.max_norm is not None and measured.clip_norm is not None:
            factor = self.measurer.clip_factor(measured.clip_norm, enforced.grad_scale)
            enforced = enforced._replace(clip_factor=factor)
        self._apply(parameters, enforced, measured.divisor)

    def _apply(
        self, parameters: Sequence[Tensor], enforced: EnforcedDecision, divisor: Tensor | None
    ) -> None:
        """Enforces a decision, unless the host skips the step. A neutral decision changes no bit.

        The fused kernel enforces a decision on the device, and subtracts a `found_inf` of exactly 0
        from its step counter.

        Args:
            parameters: all parameters of the optimizer, in its order.
            enforced: the decision; on the host if `_needs_host`.
            divisor: a GradScaler's scale that the gradients still contain, 0-d float32, or None.
        """
        self._enforced = enforced
        if enforced.skip is True:
            return
        self._clip(parameters, enforced, divisor)
        if isinstance(enforced.skip, Tensor):
            self._replace(vars(self.optimizer), "found_inf", enforced.skip)
        scale = enforced.lr_scale
        if not isinstance(scale, Tensor) and scale in (None, 1.0):
            return
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:
                continue
            # A rate in a tensor is read by the kernel on the device, in float32. On a CPU the rate
            # stays exact.
            own = scale
            if isinstance(own, Tensor) and own.is_cpu and not isinstance(rate, Tensor):
                own = own.to(torch.float64)
            self._replace(group, "lr", rate * own)

    def _clip(
        self,
        parameters: Sequence[Tensor],
        enforced: EnforcedDecision,
        divisor: Tensor | None = None,
    ) -> None:
        """Clips the gradients: in the fused kernel, or else in place.

        A fixed clip is always in place, because a kernel divides where torch's clip multiplies.
        """
        on_device = isinstance(enforced.skip, Tensor)
        if enforced.group_scale is not None:
            if on_device:
                factors = enforced.group_scale.unbind()
            else:
                factors = enforced.group_scale.tolist()
            for p, factor in zip(parameters, factors, strict=True):
                gradients.scale_([p], factor)
        factor = enforced.clip_factor
        if factor is not None:
            # On a CPU nothing waits to be read. Elsewhere a product with 1 costs less than a sync.
            if on_device or not factor.is_cpu or factor.double().numpy() < 1:
                gradients.scale_(parameters, factor)
            return
        scale = enforced.grad_scale
        # CUDA's SGD with momentum rounds differently if it divides, even by 1.
        if scale is None or (not on_device and scale == 1.0):
            return
        if not self._uses_kernel():
            gradients.scale_(parameters, scale)
            return
        if not on_device:
            scale = torch.full((), scale, dtype=torch.float32, device=self.measurer.home)
        if divisor is None:
            divisor = torch.ones_like(scale)
        self._replace(vars(self.optimizer), "grad_scale", divisor / scale)

    def _uses_kernel(self) -> bool:
        return self.has_kernel and _all_fused(self.optimizer)

    def _needs_host(self, params: Sequence[Tensor]) -> bool:
        """Whether enforcing this step needs the decision on the host.

        A fused SGD that skips leaves new momentum buffers uninitialised, so the host decides the
        step that creates the buffers.

        Args:
            params: the parameters with gradients.
        """
        if not self._uses_kernel():
            return True
        optimizer = self.optimizer
        if not isinstance(optimizer, SGD):
            return False
        if all(group["momentum"] == 0 for group in optimizer.param_groups):
            return False
        return any(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in params)

    # -- restore --------------------------------------------------------------------------------

    def _replace(self, values: dict[str, Any], name: str, value: Any) -> None:
        """Replaces an entry of a group, or an attribute of the optimizer, for the step."""
        self._replaced.append((values, name, value, values.get(name, _ABSENT)))
        values[name] = value

    def _restore(self) -> None:
        """Restores everything that was replaced for the step, the newest first.

        A value that other code has written meanwhile stays, for example the rate of a scheduler
        that a hook of the step calls.

        Also `grad_scale` and `found_inf`: `GradScaler.step` multiplies its scale by an existing
        `grad_scale`, or after `unscale_` keeps that value, and deletes both after the step.
        """
        for values, name, value, before in reversed(self._replaced):
            if values.get(name) is not value:
                continue
            if before is _ABSENT:
                del values[name]
            else:
                values[name] = before
        self._replaced.clear()

    def _finish(self, has_ended: bool) -> None:
        """Restores what was replaced, and reports a step that has ended without an exception."""
        self._restore()
        if not has_ended:
            return
        self.in_update = False
        # Also the losses of a closure's later evaluations. An evaluation of a step that was not
        # judged, for example one without gradients, waits for the next step.
        self.measurer.losses.clear()
        if self.numbers is not None:
            self.numbers.find_changes_by_step()
        params = gradients.parameters(self.optimizer)
        if self._enforced.skip is not True:
            self._grads_are_none = all(p.grad is None for p in params)
        else:
            if self._grads_are_none:
                for p in params:
                    p.grad = None
            # A scheduler asks whether `step` was called before it.
            if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._report_end(self._enforced.skip)

    # -- steps that are not called, or not judged ---------------------------------------------

    def _check_running(self, *_: Any) -> None:
        """The pre-hook of the optimizer. A step that bypasses the replacement runs unjudged."""
        if self.in_update:
            return
        self.measurer.losses.clear()
        self.measurer.dropped.stepped = True
        self.attach_log.write_once(
            "step() was stored before attach(), so its steps are not judged: attach before the "
            "code that stores it (accelerate with fp16: pass accelerate's optimizer to attach)",
        )

    def judge_dropped(self) -> None:
        """See `Healing.judge_dropped`.

        The step counts as a step with non-finite gradients, and is reported to the listener like
        every other step.
        """
        if not self.measurer.dropped.take():
            return
        with torch.no_grad():
            tensors = self.live_engine.tensors
            alone = self.all_reduce.ranks.world == 1
            self.live_engine.step(self.measurer.measure_dropped(tensors, alone=alone))
            self._report(Measurement())
        self._report_end(False)

    # -- the records of the steps ---------------------------------------------------------------

    def _report(self, measured: Measurement) -> None:
        """Reports a step that the engine has judged now. A subclass may report less."""
        self.listener.judged(measured)
        if self._resets_moments:
            self._unread.append(self.live_engine.pending_record())

    def _report_end(self, skipped: bool | Tensor) -> None:
        """Finds out whether a reset is due, and calls the listener.

        The step that cuts the learning rate does not reset the moments, because its gradient is
        damaged and would become the first entry of the new moments. A skipped step postpones the
        reset further.
        """
        while len(self._unread) > self.live_engine.record_lag:
            record = self._unread.popleft()()
            if record.action & Action.CUT_LR and record.taken:
                self._reset_is_due = True
        self.listener.ended(skipped)

    def on_state_loaded(self, *, keeps_signals: bool = False) -> None:
        """Drops what belongs to an earlier state. Call it after the engine's state is replaced.

        A reset of the moments that was due would drop the moments of the checkpoint.

        Args:
            keeps_signals: whether the losses and the evaluation since the last step still hold.
        """
        if not keeps_signals:
            self.measurer.clear()
        self._unread.clear()
        self._reset_is_due = False
        self.attach_log.on_state_loaded()

    def remove_listener(self) -> None:
        """Logs the lines of `attach` again, and releases all numbers that a Healer held."""
        self.listener = self.attach_log
        self.numbers = None

    def detach(self) -> None:
        """See `Healing.detach`.

        The listener is removed too, so that no Healer is called for later steps. State and metrics
        of the engine stay.
        """
        if not self.attached:
            return
        self.attached = False
        self._restore_step()
        self.undo_stack.close()
        self.remove_listener()
        self.measurer.clear()


def _marks(params: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Numbers of writes in place of each parameter and gradient, and the gradient's identity."""
    marks: list[tuple[int, int, int]] = []
    for p in params:
        marks.append((p._version, id(p.grad), getattr(p.grad, "_version", -1)))
    return marks


def has_kernel(optimizer: Optimizer) -> bool:
    """Whether an optimizer can clip and skip inside its fused kernel.

    For GradScaler, fused Adam, AdamW, SGD and Adagrad divide the gradients by
    `optimizer.grad_scale`, and change nothing if `optimizer.found_inf` is 1. torch marks them by
    `_step_supports_amp_scaling`. A third-party step() may compute the update itself, or change the
    update of super().step().
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not _all_fused(optimizer) or is_third_party(optimizer):
        return False
    # Offloaded in part: on a CPU torch reads found_inf before the device has written it.
    device_types = {p.device.type for p in gradients.parameters(optimizer)}
    return len(device_types) == 1


def _all_fused(optimizer: Optimizer) -> bool:
    """Whether every group runs the fused kernel now; `load_state_dict` can change that."""
    return all(group.get("fused") for group in optimizer.param_groups)
