"""Fused SGD's momentum buffer, when the very first step is held back.

The kernel's wrapper makes the buffer with `empty_like` and leaves filling it to the kernel; told
by found_inf to do nothing, the kernel leaves whatever lay in that memory, and the next step takes
it for momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class FirstMomentum:
    """Fills the buffers that a held-back first step leaves uninitialised.

    With -0.0, not 0.0: `momentum * -0.0 + g` is `g` for every g, zeros of either sign included,
    which is what the first step would have stored. That needs dampening 0; with dampening the
    first step is special (`g`, not `(1 - dampening) * g`) and has to be decided on the host.
    """

    def __init__(self) -> None:
        self._fresh: list[Tensor] = []
        self._found_inf: Tensor | None = None

    def needs_host(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        """Whether a skip of this step can only be exact if the host knows of it."""
        if not isinstance(optimizer, SGD):
            return False
        if not any(g["momentum"] != 0 and g["dampening"] != 0 for g in optimizer.param_groups):
            return False
        return bool(_without_buffer(optimizer, params))

    def open(self, optimizer: Optimizer, params: Sequence[Tensor], found_inf: Tensor) -> None:
        """Before the step.

        Args:
            optimizer: the optimizer about to step.
            params: its parameters with gradients.
            found_inf: 0-d float32, 0 or 1, the flag that the kernel is going to read.
        """
        if isinstance(optimizer, SGD):
            self._fresh, self._found_inf = _without_buffer(optimizer, params), found_inf

    def close(self, optimizer: Optimizer) -> None:
        """After the step: fills what is new if it was held back."""
        if not self._fresh:
            return
        with torch.no_grad():
            for p in self._fresh:
                buffer = optimizer.state[p].get("momentum_buffer")
                if buffer is None or self._found_inf is None:
                    continue
                held = self._found_inf.to(buffer.device, non_blocking=True) > 0
                buffer.copy_(torch.where(held, torch.full_like(buffer, -0.0), buffer))
        self._fresh, self._found_inf = [], None


def _without_buffer(optimizer: SGD, params: Sequence[Tensor]) -> list[Tensor]:
    """Parameters about to get their momentum buffer."""
    if all(group["momentum"] == 0 for group in optimizer.param_groups):
        return []
    state = optimizer.state
    return [p for p in params if state.get(p, {}).get("momentum_buffer") is None]
