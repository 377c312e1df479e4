"""Fused SGD's momentum buffer when the first step is skipped.

torch creates the buffer with `empty_like` and lets the kernel fill it. Where found_inf tells the
kernel to do nothing, the buffer stays uninitialised memory, which the next step takes for momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class FirstStepMomentum:
    """Fills the buffers that a skipped first step leaves uninitialised.

    With -0.0, not 0.0: `momentum * -0.0 + g` is `g` for every g, zeros of either sign included,
    which is what the first step would have stored. That needs dampening 0; with dampening the
    first step is special (`g`, not `(1 - dampening) * g`) and has to be decided on the host.
    """

    def __init__(self) -> None:
        self._new: list[Tensor] = []
        self._found_inf: Tensor | None = None

    def needs_host(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        """Whether this step can only be skipped exactly if the host knows of the skip."""
        if not isinstance(optimizer, SGD):
            return False
        if not any(g["momentum"] != 0 and g["dampening"] != 0 for g in optimizer.param_groups):
            return False
        return bool(_without_buffer(optimizer, params))

    def before_step(
        self, optimizer: Optimizer, params: Sequence[Tensor], found_inf: Tensor
    ) -> None:
        """Notes which parameters get their buffer in this step.

        Args:
            optimizer: the optimizer about to step.
            params: its parameters with gradients.
            found_inf: 0-d float32, 0 or 1, the flag that the kernel is going to read.
        """
        if isinstance(optimizer, SGD):
            self._new, self._found_inf = _without_buffer(optimizer, params), found_inf

    def after_step(self, optimizer: Optimizer) -> None:
        """Fills the new buffers if the step was skipped."""
        if not self._new:
            return
        with torch.no_grad():
            for p in self._new:
                buffer = optimizer.state[p].get("momentum_buffer")
                if buffer is None or self._found_inf is None:
                    continue
                skipped = self._found_inf.to(buffer.device, non_blocking=True) > 0
                buffer.copy_(torch.where(skipped, torch.full_like(buffer, -0.0), buffer))
        self._new, self._found_inf = [], None


def _without_buffer(optimizer: SGD, params: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that have no momentum buffer yet and are about to get one."""
    if all(group["momentum"] == 0 for group in optimizer.param_groups):
        return []
    state = optimizer.state
    return [p for p in params if state.get(p, {}).get("momentum_buffer") is None]
