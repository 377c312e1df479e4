"""Enforces a decision on one optimizer: clips, scales the rate, resets the moments.

Learning rates and the two attributes that fused kernels read are changed for one step, and restored
afterwards unless other code has written there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer

from healcore.runtime.healthy_range import HealthyRange
from healcore.torch import gradients
from healcore.torch.engines import DeviceOrder, HostOrder
from healcore.torch.optimizer_numbers import entries

_ABSENT = object()


class Enforcer:
    """Enforces orders on one optimizer.

    Args:
        optimizer: the optimizer to heal.
        by_kernel: whether the optimizer's fused kernels read `grad_scale` and `found_inf`.
        scales_lr: whether the policy may scale the learning rate.
    """

    def __init__(self, optimizer: Optimizer, *, by_kernel: bool, scales_lr: bool) -> None:
        self.by_kernel = by_kernel
        self._optimizer = optimizer
        self._scales_lr = scales_lr
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """For each replaced value: dictionary, name, value for one step, value before."""

    def amp_flags(self) -> tuple[Tensor | None, Tensor | None]:
        """A GradScaler's `(grad_scale, found_inf)` for this step: 0-d float32, or None."""
        values = vars(self._optimizer)
        scale, found = values.get("grad_scale"), values.get("found_inf")
        return (
            scale if isinstance(scale, Tensor) else None,
            found if isinstance(found, Tensor) else None,
        )

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
        self, all_parameters: Sequence[Tensor], order: HostOrder, divisor: Tensor | None
    ) -> None:
        """Enforces an order that is on the host, unless it skips. Neutral factors change nothing.

        `divisor` (0-d float32) is the GradScaler's scale that the gradients still have, or None.
        """
        if order.skip:
            return
        self.clip(all_parameters, order, divisor)
        if order.lr_scale != 1.0:
            self.scale_lr(order.lr_scale)

    def enforce_on_device(self, all_parameters: Sequence[Tensor], order: DeviceOrder) -> None:
        """Enforces an order that stays on the device, where the fused kernel reads it.

        A neutral order changes no bit: the kernel divides by exactly 1, and subtracts a `found_inf`
        of exactly 0 from its step counter.
        """
        if order.group_scale is not None:
            gradients.scale_each_(all_parameters, order.group_scale.unbind())
        self._set_amp_flag("grad_scale", order.grad_divisor)
        self._set_amp_flag("found_inf", order.found_inf)
        if self._scales_lr:
            self.scale_lr(order.lr_scale)

    def learning_rate(self) -> float | None:
        """The first group's rate, without this step's multiplier. A sync if it is on a device."""
        group = self._optimizer.param_groups[0]
        rate = group.get("lr")
        for values, name, _, before in reversed(self._replaced):
            if values is group and name == "lr":
                rate = before
        return None if rate is None else float(rate)

    def scale_lr(self, factor: float | Tensor) -> None:
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
            self._replace(group, "lr", scaled)

    def hold_numbers(self, name: str, healthy: Mapping[str, HealthyRange]) -> None:
        """Replaces unusual numbers by the last healthy ones. `name` is the optimizer's."""
        for entry in entries(name, self._optimizer) if healthy else ():
            held = [healthy[n].held(v) if n in healthy else v for n, v in entry.numbers.items()]
            if held != [*entry.numbers.values()]:
                self._replace(entry.group, entry.key, entry.with_numbers(held))

    def clip(
        self, all_parameters: Sequence[Tensor], order: HostOrder, divisor: Tensor | None = None
    ) -> None:
        """Clips in the fused kernel if the optimizer has one, else in a pass over the gradients."""
        if order.group_scale is not None:
            gradients.scale_each_(all_parameters, order.group_scale.tolist())
        if order.grad_scale == 1.0:
            return
        if self._uses_kernel():
            # In float32 and in this order, as in the device engine.
            device = all_parameters[0].device
            scale = torch.full((), order.grad_scale, dtype=torch.float32, device=device)
            base = torch.ones_like(scale) if divisor is None else divisor
            self._set_amp_flag("grad_scale", base / scale)
        else:
            gradients.scale_(all_parameters, order.grad_scale)

    def restore(self) -> None:
        """Restores everything that was changed for the step."""
        for values, name, value, before in reversed(self._replaced):
            if values.get(name) is not value:
                continue
            if before is _ABSENT:
                del values[name]
            else:
                values[name] = before
        self._replaced.clear()

    def _uses_kernel(self) -> bool:
        return self.by_kernel and all_fused(self._optimizer)

    def _set_amp_flag(self, name: str, value: Tensor) -> None:
        """Sets `grad_scale` or `found_inf`, which GradScaler and fused kernels use, for one step.

        `restore` removes both, because `GradScaler.step` multiplies its scale by an existing
        `grad_scale`, or after `unscale_` keeps that value, and deletes both after the step.
        """
        self._replace(vars(self._optimizer), name, value)

    def _replace(self, values: dict[str, Any], name: str, value: Any) -> None:
        self._replaced.append((values, name, value, values.get(name, _ABSENT)))
        values[name] = value


def all_fused(optimizer: Optimizer) -> bool:
    """Whether every group runs the fused kernel now; `load_state_dict` can change that."""
    return all(group.get("fused") for group in optimizer.param_groups)


def is_third_party(optimizer: Optimizer) -> bool:
    """Whether the class defines `step()` outside of torch.optim."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def moments_obstacle(optimizer: Optimizer) -> str:
    """Reason why the moments cannot be reset, or an empty string."""
    if not is_third_party(optimizer):
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
