"""Enforces a decision on one optimizer: clips, scales the rate, resets the moments.

Learning rates, held numbers, and the two attributes that fused kernels read are changed for one
step, and restored afterwards unless other code has written there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer

from healcore.torch import gradients
from healcore.torch.engines import StepOrder

_ABSENT = object()


class Enforcer:
    """Enforces orders on one optimizer.

    Attributes:
        has_kernel: whether the optimizer can clip and skip inside its fused kernel.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.has_kernel = _has_kernel(optimizer)
        self._optimizer = optimizer
        self._home = gradients.parameters(optimizer)[0].device
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """For each replaced value: dictionary, name, value for one step, value before."""

    def amp_flags(self) -> tuple[Tensor | None, Tensor | None]:
        """A GradScaler's scale and `found_inf` for this step: 0-d float32, or None."""
        flags: list[Tensor | None] = []
        for name in ("grad_scale", "found_inf"):
            flag = vars(self._optimizer).get(name)
            is_set = isinstance(flag, Tensor)
            flags.append(gradients.moved(flag, self._home, torch.float32) if is_set else None)
        return flags[0], flags[1]

    def needs_host(self, params: Sequence[Tensor]) -> bool:
        """Whether enforcing this step needs the order on the host.

        A fused SGD that skips leaves new momentum buffers uninitialised, so the host decides the
        step that creates the buffers of `params`, the parameters with gradients.
        """
        if not self._uses_kernel():
            return True
        if not isinstance(self._optimizer, SGD):
            return False
        state = self._optimizer.state
        return any(group["momentum"] != 0 for group in self._optimizer.param_groups) and any(
            state.get(p, {}).get("momentum_buffer") is None for p in params
        )

    def enforce(
        self, parameters: Sequence[Tensor], order: StepOrder, divisor: Tensor | None
    ) -> None:
        """Enforces an order, unless it skips on the host. A neutral order changes no bit.

        An order on the device is enforced by the fused kernel, which subtracts a `found_inf` of
        exactly 0 from its step counter. If `needs_host` is True, the order is on the host.
        `divisor` is a GradScaler's scale that the gradients still contain.
        """
        if isinstance(order.skip, Tensor):
            if order.group_scale is not None:
                gradients.scale_each_(parameters, order.group_scale.unbind())
            if order.clip_factor is not None:
                skip = gradients.moved(order.skip, order.clip_factor.device)
                gradients.multiply_(parameters, order.clip_factor.masked_fill(skip > 0, 1.0))
            # CUDA's SGD with momentum rounds differently if it divides, even by 1.
            elif order.grad_divisor is not None:
                self.replace(vars(self._optimizer), "grad_scale", order.grad_divisor)
            self.replace(vars(self._optimizer), "found_inf", order.skip)
            if order.lr_scale is not None:
                self._scale_lr(order.lr_scale)
        elif not order.skip:
            self.clip(parameters, order, divisor)
            if order.lr_scale != 1.0:
                self._scale_lr(order.lr_scale)

    def clip(
        self, parameters: Sequence[Tensor], order: StepOrder, divisor: Tensor | None = None
    ) -> None:
        """Clips by an order on the host: in the fused kernel, or else in place.

        A fixed clip is always in place, because a kernel divides where torch's clip multiplies.
        """
        if order.group_scale is not None:
            gradients.scale_each_(parameters, order.group_scale.tolist())
        if order.clip_factor is not None:
            # On a CPU nothing waits to be read. Elsewhere a product with 1 costs less than a sync.
            if not order.clip_factor.is_cpu or order.clip_factor.double().numpy() < 1:
                gradients.multiply_(parameters, order.clip_factor)
            return
        if order.grad_scale == 1.0:
            return
        if self._uses_kernel():
            # In float32 and in this order, as in the device engine.
            scale = torch.full((), order.grad_scale, dtype=torch.float32, device=self._home)
            base = torch.ones_like(scale) if divisor is None else divisor
            self.replace(vars(self._optimizer), "grad_scale", base / scale)
        else:
            gradients.scale_(parameters, order.grad_scale)

    def replace(self, values: dict[str, Any], name: str, value: Any) -> None:
        """Replaces a value of a dictionary, such as a parameter group, until `restore`."""
        self._replaced.append((values, name, value, values.get(name, _ABSENT)))
        values[name] = value

    def restore(self) -> None:
        """Restores everything that was changed for the step.

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

    def _uses_kernel(self) -> bool:
        return self.has_kernel and _all_fused(self._optimizer)

    def _scale_lr(self, factor: float | Tensor) -> None:
        """Multiplies the learning rate of every group that has one.

        `restore` restores the user's object, so that a scheduler reads its own value. If `factor`
        is a 0-d float32 tensor, the rate becomes a tensor that fused kernels read on the device. On
        an accelerator this rounds a Python rate to float32; on a CPU the rate is exact.
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
            self.replace(group, "lr", scaled)


def _has_kernel(optimizer: Optimizer) -> bool:
    """See `Enforcer.has_kernel`.

    For GradScaler, fused Adam, AdamW, SGD and Adagrad divide the gradients by
    `optimizer.grad_scale`, and change nothing if `optimizer.found_inf` is 1. torch marks them by
    `_step_supports_amp_scaling`. A third-party step() may compute the update itself, or change the
    update of super().step().
    """
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    kinds = {p.device.type for p in gradients.parameters(optimizer)}
    # Offloaded in part: on a CPU torch reads found_inf before the device has written it.
    if not supports or not _all_fused(optimizer) or len(kinds) > 1:
        return False
    return not _is_third_party(optimizer)


def _all_fused(optimizer: Optimizer) -> bool:
    """Whether every group runs the fused kernel now; `load_state_dict` can change that."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _is_third_party(optimizer: Optimizer) -> bool:
    """Whether the class defines `step()` outside of torch.optim."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def moments_obstacle(optimizer: Optimizer) -> str:
    """Reason why the moments cannot be reset, or an empty string."""
    if not _is_third_party(optimizer):
        return ""
    return (
        f"{type(optimizer).__name__} has a step() of its own, and only the optimizers of "
        "torch.optim are known to start with an empty state"
    )


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """Resets moments and step counters, as if the optimizer had not taken a step.

    torch's optimizers create `state` (moments, and the step counter of the bias correction) at a
    parameter's first step, so an empty `state` is the start. Only Adagrad creates its `state` in
    its constructor. Learning rates and schedulers are not in `state`.
    """
    if not isinstance(optimizer, Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"].zero_()
            state["sum"].fill_(group["initial_accumulator_value"])
