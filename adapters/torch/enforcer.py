"""Enforces a decision on one optimizer step: clips it, skips it, scales its learning rate.

What is changed on the optimizer (learning rates, `.grad`, the two attributes that fused kernels
read) is changed for one step. It is restored afterwards, unless somebody else has written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from healcore.torch import gradients
from healcore.torch.engines import DeviceOrder, HostOrder
from healcore.torch.skipped_step import StepSkipper

_ABSENT = object()


class Enforcer:
    """Enforces orders on one optimizer. Everything is restored after the step.

    Args:
        optimizer: the optimizer.
        by_kernel: the optimizer's fused kernels take `grad_scale` and `found_inf`.
        cuts_lr: the policy may scale the learning rate.
    """

    def __init__(self, optimizer: Optimizer, *, by_kernel: bool, cuts_lr: bool) -> None:
        self.by_kernel = by_kernel
        self.step_skipper = StepSkipper(optimizer)
        self._optimizer = optimizer
        self._cuts_lr = cuts_lr
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Dictionary, name, value for one step, value before."""
        self._hidden: list[tuple[Tensor, Tensor]] = []
        """Parameters whose `.grad` is None for one step, and their gradients."""
        self._momentum = FirstStepMomentum(optimizer)

    def amp_flags(self) -> tuple[Tensor | None, Tensor | None]:
        """What a GradScaler (or the user) has set for the step that begins.

        Returns:
            `(grad_scale, found_inf)`, 0-d float32 tensors on the scaler's device, or None.
        """
        scale, found = (vars(self._optimizer).get(name) for name in ("grad_scale", "found_inf"))
        return (
            scale if isinstance(scale, Tensor) else None,
            found if isinstance(found, Tensor) else None,
        )

    def needs_host(self, params: list[Tensor]) -> bool:
        """Whether the host must know the order of this step; see also `FirstStepMomentum`."""
        return not self._uses_kernel() or self._momentum.needs_host(params)

    def enforce(
        self, everything: Sequence[Tensor], order: HostOrder, divisor: Tensor | None
    ) -> None:
        """Enforces an order that the host knows. A neutral part of it touches nothing.

        Args:
            everything: all parameters of the optimizer about to step.
            order: what to enforce.
            divisor: 0-d float32, a scale the gradients still carry, or None.
        """
        if order.skip:
            self.skip(everything)
            return
        self.clip(everything, order, divisor)
        if order.lr_scale != 1.0:
            self.scale_lr(order.lr_scale)

    def enforce_on_device(
        self, everything: Sequence[Tensor], params: list[Tensor], order: DeviceOrder
    ) -> None:
        """Enforces an order that stays on the device, where the fused kernel reads it.

        A neutral order changes no bit: the kernel divides by exactly 1 and subtracts a flag of
        exactly 0.

        Args:
            everything: all parameters of the optimizer about to step.
            params: those with a gradient.
            order: what to enforce.
        """
        if order.group_scale is not None:
            gradients.scale_each_(everything, order.group_scale.unbind())
        self._set_amp_flag("grad_scale", order.grad_divisor)
        self._set_amp_flag("found_inf", order.found_inf)
        self._momentum.before_step(params, order.found_inf)
        if self._cuts_lr:
            self.scale_lr(order.lr_scale)

    def skip(self, params: Sequence[Tensor]) -> None:
        """Makes the step an exact no-op: hides the gradients, or does not run `step()` at all.

        `.grad` set to None is an exact no-op for all of torch's optimizers; Adam, momentum SGD and
        Muon move on zeroed gradients. The same tensors are restored afterwards: with DDP's
        `gradient_as_bucket_view` they are views into its buckets, and a log of gradient norms may
        still read them.
        """
        for p in params:
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None
        self.step_skipper.skip()

    def scale_lr(self, factor: float | Tensor) -> None:
        """Multiplies the learning rate of every group that has one.

        The user's own object (float or tensor) is restored, never computed back, so a scheduler
        sees what it wrote.

        Args:
            factor: a Python number, or a 0-d float32 tensor next to the parameters: then the
                rate becomes a tensor too, which the fused kernels read on the device. Against a
                Python rate that costs a rounding: float32(lr) in place of the double lr, on
                accelerators (their kernels take a float32 pointer); in float64, and so to the
                bit, on a CPU.
        """
        for group in self._optimizer.param_groups:
            original = group.get("lr")
            if original is None:
                continue
            if isinstance(factor, Tensor) and not isinstance(original, Tensor):
                on_cpu = factor.device.type == "cpu"
                scaled = factor.to(torch.float64 if on_cpu else torch.float32) * original
            else:
                scaled = original * factor
            self._replace(group, "lr", scaled)

    def clip(
        self, everything: Sequence[Tensor], order: HostOrder, divisor: Tensor | None = None
    ) -> None:
        """Clips: in the fused kernel where there is one, else in a pass over the gradients."""
        if order.group_scale is not None:
            gradients.scale_each_(everything, order.group_scale.tolist())
        if order.grad_scale == 1.0:
            return
        if self._uses_kernel():
            # In float32 and in this order, as the device engine computes it.
            device = everything[0].device
            scale = torch.full((), order.grad_scale, dtype=torch.float32, device=device)
            base = torch.ones_like(scale) if divisor is None else divisor
            self._set_amp_flag("grad_scale", base / scale)
        else:
            gradients.scale_(everything, order.grad_scale)

    def restore(self) -> None:
        """Restores everything that was changed for the step; does nothing when nothing was."""
        self._momentum.after_step()
        for p, grad in self._hidden:
            if p.grad is None:
                p.grad = grad
        self._hidden.clear()
        for values, name, value, before in reversed(self._replaced):
            if values.get(name) is not value:
                continue
            if before is _ABSENT:
                del values[name]
            else:
                values[name] = before
        self._replaced.clear()
        self.step_skipper.reset()

    def _uses_kernel(self) -> bool:
        return self.by_kernel and all_fused(self._optimizer)

    def _set_amp_flag(self, name: str, value: Tensor) -> None:
        """Sets `grad_scale` or `found_inf`, which GradScaler and fused kernels use, for one step.

        For a fused optimizer `GradScaler.step` sets both attributes, calls `optimizer.step()`, then
        *deletes* both; it also multiplies its scale by a `grad_scale` that it finds set, and after
        `unscale_` it passes on what it finds. So nothing of healcore stays there between steps.
        """
        self._replace(vars(self._optimizer), name, value)

    def _replace(self, values: dict[str, Any], name: str, value: Any) -> None:
        self._replaced.append((values, name, value, values.get(name, _ABSENT)))
        values[name] = value


def all_fused(optimizer: Optimizer) -> bool:
    """Whether every group runs the fused kernel; `load_state_dict` can change a group's flag."""
    return all(group.get("fused") for group in optimizer.param_groups)


class FirstStepMomentum:
    """Fills fused SGD's momentum buffers that a skipped first step leaves uninitialised.

    torch creates a buffer with `empty_like` and lets the kernel fill it. Where found_inf makes
    the kernel do nothing, the buffer stays uninitialised memory, which the next step takes for
    momentum.

    It is filled with -0.0, not 0.0: `momentum * -0.0 + g` is `g` for every g, zeros of either sign
    included, which is what the first step would have stored. That needs dampening 0; with dampening
    the first step is special (`g`, not `(1 - dampening) * g`) and has to be decided on the host.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._new: list[Tensor] = []
        self._found_inf: Tensor | None = None

    def needs_host(self, params: Sequence[Tensor]) -> bool:
        """Whether this step can only be skipped exactly if the host knows of the skip."""
        return isinstance(self._optimizer, SGD) and (
            any(g["momentum"] != 0 and g["dampening"] != 0 for g in self._optimizer.param_groups)
            and bool(self._without_buffer(params))
        )

    def before_step(self, params: Sequence[Tensor], found_inf: Tensor) -> None:
        """Records which parameters get their buffer in this step.

        Args:
            params: those with gradients.
            found_inf: 0-d float32, 0 or 1, the flag that the kernel is going to read.
        """
        if isinstance(self._optimizer, SGD):
            self._new, self._found_inf = self._without_buffer(params), found_inf

    def after_step(self) -> None:
        """Fills the new buffers if the step was skipped."""
        if not self._new:
            return
        with torch.no_grad():
            for p in self._new:
                buffer = self._optimizer.state[p].get("momentum_buffer")
                if buffer is None or self._found_inf is None:
                    continue
                skipped = self._found_inf.to(buffer.device, non_blocking=True) > 0
                buffer.copy_(torch.where(skipped, torch.full_like(buffer, -0.0), buffer))
        self._new, self._found_inf = [], None

    def _without_buffer(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Parameters that have no momentum buffer yet and are about to get one."""
        if all(group["momentum"] == 0 for group in self._optimizer.param_groups):
            return []
        state = self._optimizer.state
        return [p for p in params if state.get(p, {}).get("momentum_buffer") is None]
