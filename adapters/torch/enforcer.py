"""`Enforcer`: enforces a decision on one optimizer, which it clips and whose rate it scales.

Learning rates, held numbers, and the two attributes that fused kernels read are changed for one
step, and restored afterwards unless other code has written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from healcore.torch import gradients
from healcore.torch.live_engine import EnforcedDecision
from healcore.torch.moments import is_third_party

_ABSENT = object()


class Enforcer:
    """Enforces decisions on one optimizer.

    What is changed for a step is noted, and `restore` brings it back after the step:

        enforce ─► replace(group, "lr", ...) ─► the optimizer's own step ─► restore

    Args:
        optimizer: the optimizer, with at least one parameter.

    Attributes:
        has_kernel: whether the optimizer can clip and skip inside its fused kernel.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.has_kernel = _has_kernel(optimizer)
        self._optimizer = optimizer
        self._home = gradients.parameters(optimizer)[0].device
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        """What is replaced for the step, the oldest first: dictionary, key, value for the step, and
        value before or `_ABSENT`."""

    def amp_flag(self, name: str) -> Tensor | None:
        """An attribute that a GradScaler sets on a fused optimizer for one step.

        Args:
            name: "grad_scale", the scale that the gradients still contain; or "found_inf", above 0
                after an overflow.

        Returns:
            0-d float32 on the device of the first parameter, or None if it is not set.
        """
        value = vars(self._optimizer).get(name)
        if isinstance(value, Tensor):
            return gradients.to_device(value, self._home, torch.float32)
        return None

    def needs_host(self, params: Sequence[Tensor]) -> bool:
        """Whether enforcing this step needs the decision on the host.

        A fused SGD that skips leaves new momentum buffers uninitialised, so the host decides the
        step that creates the buffers.

        Args:
            params: the parameters with gradients.
        """
        if not self._uses_kernel():
            return True
        optimizer = self._optimizer
        if not isinstance(optimizer, SGD):
            return False
        if all(group["momentum"] == 0 for group in optimizer.param_groups):
            return False
        return any(optimizer.state.get(p, {}).get("momentum_buffer") is None for p in params)

    def enforce(
        self, parameters: Sequence[Tensor], enforced: EnforcedDecision, divisor: Tensor | None
    ) -> None:
        """Enforces a decision, unless the host skips the step. A neutral decision changes no bit.

        The fused kernel enforces a decision on the device, and subtracts a `found_inf` of exactly 0
        from its step counter. If `needs_host` is True, the decision is on the host.

        Args:
            parameters: all parameters of the optimizer, in its order.
            enforced: what the engine has decided for this step.
            divisor: a GradScaler's scale that the gradients still contain, 0-d float32, or None.
        """
        if enforced.skip is True:
            return
        self.clip(parameters, enforced, divisor)
        if isinstance(enforced.skip, Tensor):
            self.replace(vars(self._optimizer), "found_inf", enforced.skip)
        scale = enforced.lr_scale
        if isinstance(scale, Tensor) or scale not in (None, 1.0):
            self._scale_lr(scale)

    def clip(
        self,
        parameters: Sequence[Tensor],
        enforced: EnforcedDecision,
        divisor: Tensor | None = None,
    ) -> None:
        """Clips the gradients: in the fused kernel, or else in place.

        A fixed clip is always in place, because a kernel divides where torch's clip multiplies.

        Args:
            parameters: all parameters of the optimizer, in its order.
            enforced: what the engine has decided for this step.
            divisor: as in `enforce`.
        """
        on_device = isinstance(enforced.skip, Tensor)
        if enforced.group_scale is not None:
            if on_device:
                factors = enforced.group_scale.unbind()
            else:
                factors = enforced.group_scale.tolist()
            for p, factor in zip(parameters, factors, strict=True):
                gradients.scale_([p], factor)
        if enforced.clip_factor is not None:
            factor = enforced.clip_factor
            if on_device:
                skip = gradients.to_device(enforced.skip, factor.device)
                factor = factor.masked_fill(skip > 0, 1.0)
            # On a CPU nothing waits to be read. Elsewhere a product with 1 costs less than a sync.
            elif factor.is_cpu and not factor.double().numpy() < 1:
                return
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
            scale = torch.full((), scale, dtype=torch.float32, device=self._home)
        if divisor is None:
            divisor = torch.ones_like(scale)
        self.replace(vars(self._optimizer), "grad_scale", divisor / scale)

    def replace(self, values: dict[str, Any], name: str, value: Any) -> None:
        """Replaces a value of a dictionary until `restore`.

        Args:
            values: a parameter group, or the attributes of the optimizer.
            name: the key. It need not be there.
            value: the value for this step.
        """
        self._replaced.append((values, name, value, values.get(name, _ABSENT)))
        values[name] = value

    def restore(self) -> None:
        """Restores everything that was changed for the step, the newest change first.

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
            scale = factor
            if isinstance(scale, Tensor) and scale.is_cpu and not isinstance(original, Tensor):
                scale = scale.to(torch.float64)
            self.replace(group, "lr", original * scale)


def _has_kernel(optimizer: Optimizer) -> bool:
    """See `Enforcer.has_kernel`.

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
