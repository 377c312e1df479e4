"""`Enforcer`: enforces a decision on one optimizer, which it clips and whose rate it scales.

Learning rates, held numbers, and the two attributes that fused kernels read are changed for one
step, and restored afterwards unless other code has written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from healcore.torch import gradients
from healcore.torch.engines import EnforcedDecision
from healcore.torch.moments import is_third_party

_ABSENT = object()


class _Replaced(NamedTuple):
    """A value of a dictionary that is replaced for one step."""

    values: dict[str, Any]
    """The dictionary: a parameter group, or the attributes of the optimizer."""
    name: str
    """The key."""
    value: Any
    """The value for one step."""
    before: Any
    """The value before, or `_ABSENT`."""


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
        self._replaced: list[_Replaced] = []
        """The values that are replaced for the step, the oldest first."""

    def amp_flags(self) -> tuple[Tensor | None, Tensor | None]:
        """The attributes that a GradScaler sets on a fused optimizer for one step.

        Returns:
            The scale that the gradients still contain, and `found_inf`, above 0 after an overflow.
            Each is 0-d float32 on the device of the first parameter, or None if it is not set.
        """
        attributes = vars(self._optimizer)
        scale = attributes.get("grad_scale")
        if isinstance(scale, Tensor):
            scale = gradients.to_device(scale, self._home, torch.float32)
        else:
            scale = None
        found_inf = attributes.get("found_inf")
        if isinstance(found_inf, Tensor):
            found_inf = gradients.to_device(found_inf, self._home, torch.float32)
        else:
            found_inf = None
        return scale, found_inf

    def needs_host(self, params: Sequence[Tensor]) -> bool:
        """Whether enforcing this step needs the decision on the host.

        A fused SGD that skips leaves new momentum buffers uninitialised, so the host decides the
        step that creates the buffers.

        Args:
            params: the parameters with gradients.
        """
        if not self._uses_kernel():
            return True
        if not isinstance(self._optimizer, SGD):
            return False
        has_momentum = any(group["momentum"] != 0 for group in self._optimizer.param_groups)
        if not has_momentum:
            return False
        state = self._optimizer.state
        return any(state.get(p, {}).get("momentum_buffer") is None for p in params)

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
        if isinstance(enforced.skip, Tensor):
            if enforced.group_scale is not None:
                gradients.scale_each_(parameters, enforced.group_scale.unbind())
            if enforced.clip_factor is not None:
                skip = gradients.to_device(enforced.skip, enforced.clip_factor.device)
                gradients.multiply_(parameters, enforced.clip_factor.masked_fill(skip > 0, 1.0))
            # CUDA's SGD with momentum rounds differently if it divides, even by 1.
            elif enforced.grad_divisor is not None:
                self.replace(vars(self._optimizer), "grad_scale", enforced.grad_divisor)
            self.replace(vars(self._optimizer), "found_inf", enforced.skip)
            if enforced.lr_scale is not None:
                self._scale_lr(enforced.lr_scale)
        elif not enforced.skip:
            self.clip(parameters, enforced, divisor)
            if enforced.lr_scale != 1.0:
                self._scale_lr(enforced.lr_scale)

    def clip(
        self,
        parameters: Sequence[Tensor],
        enforced: EnforcedDecision,
        divisor: Tensor | None = None,
    ) -> None:
        """Clips by a decision on the host: in the fused kernel, or else in place.

        A fixed clip is always in place, because a kernel divides where torch's clip multiplies.

        Args:
            parameters: all parameters of the optimizer, in its order.
            enforced: a decision whose numbers are Python numbers.
            divisor: as in `enforce`.
        """
        if enforced.group_scale is not None:
            gradients.scale_each_(parameters, enforced.group_scale.tolist())
        if enforced.clip_factor is not None:
            # On a CPU nothing waits to be read. Elsewhere a product with 1 costs less than a sync.
            if not enforced.clip_factor.is_cpu or enforced.clip_factor.double().numpy() < 1:
                gradients.multiply_(parameters, enforced.clip_factor)
            return
        if enforced.grad_scale == 1.0:
            return
        if self._uses_kernel():
            # In float32 and in this order, as in the device engine.
            scale = torch.full((), enforced.grad_scale, dtype=torch.float32, device=self._home)
            if divisor is None:
                divisor = torch.ones_like(scale)
            self.replace(vars(self._optimizer), "grad_scale", divisor / scale)
        else:
            gradients.scale_(parameters, enforced.grad_scale)

    def replace(self, values: dict[str, Any], name: str, value: Any) -> None:
        """Replaces a value of a dictionary until `restore`.

        Args:
            values: a parameter group, or the attributes of the optimizer.
            name: the key. It need not be there.
            value: the value for this step.
        """
        self._replaced.append(_Replaced(values, name, value, values.get(name, _ABSENT)))
        values[name] = value

    def value_of_program(self, values: dict[str, Any], name: str) -> Any:
        """The value to which `restore` returns, or None without one.

        Args:
            values: a parameter group.
            name: the key.
        """
        for each in self._replaced:
            if each.values is values and each.name == name:
                return each.before
        return values.get(name)

    def restore(self) -> None:
        """Restores everything that was changed for the step, the newest change first.

        A value that other code has written meanwhile stays, for example the rate of a scheduler
        that a hook of the step calls.

        Also `grad_scale` and `found_inf`: `GradScaler.step` multiplies its scale by an existing
        `grad_scale`, or after `unscale_` keeps that value, and deletes both after the step.
        """
        for each in reversed(self._replaced):
            if each.values.get(each.name) is not each.value:
                continue
            if each.before is _ABSENT:
                del each.values[each.name]
            else:
                each.values[each.name] = each.before
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
                if factor.device.type == "cpu":
                    scaled = factor.to(torch.float64) * original
                else:
                    scaled = factor.to(torch.float32) * original
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
