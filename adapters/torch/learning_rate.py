"""Scaling the learning rate for one step, and giving it back exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class BorrowedRate:
    """Replaces every group's `lr` for the length of one step.

    The user's own object (float or tensor) is put aside and put back, never computed back, so a
    scheduler sees what it wrote. Whoever writes a new `lr` during the step keeps it.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[dict[str, Any], Any, Any]] = []

    def scale(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiplies the rate of every group that has one.

        Args:
            optimizer: the optimizer about to step.
            factor: a Python number, or a 0-d float32 tensor next to the parameters: then the
                rate becomes a tensor too, which the fused kernels read on the device. Against a
                Python rate that costs a rounding: float32(lr) in place of the double lr, on
                accelerators (their kernels take a float32 pointer); in float64, and so to the
                bit, on a CPU.
        """
        for group in optimizer.param_groups:
            own = group.get("lr")
            if own is None:
                continue
            if isinstance(factor, Tensor) and not isinstance(own, Tensor):
                on_cpu = factor.device.type == "cpu"
                lent = factor.to(torch.float64 if on_cpu else torch.float32) * own
            else:
                lent = own * factor
            group["lr"] = lent
            self._lent.append((group, lent, own))

    def restore(self) -> None:
        """Puts every rate back; harmless when nothing is lent."""
        for group, lent, own in self._lent:
            if group["lr"] is lent:
                group["lr"] = own
        self._lent.clear()
