"""Batch statistics of a step that was skipped go back to what they were before it.

A forward pass in train mode writes them (`running_mean`, `running_var`, `num_batches_tracked`)
before anybody can judge the step: without this, one NaN in a batch stays in them for ever.

The copy is taken after each step and not in the forward, where a hook would be traced into the
user's compiled model. Everything lies in one flat tensor for each dtype and device, so that a
step costs a handful of kernels, whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""torch's own, by which other libraries' layers go too."""


class BatchStatistics:
    """The statistics of some layers, as they were after the last step that was taken.

    Args:
        layers: any modules; what is not called by one of `NAMES` is left alone.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._held: list[Tensor] = []
        self._blocks: list[_Block] = []
        self.keep()

    def cover(self, layers: Sequence[nn.Module]) -> None:
        """Takes other layers; those that were there already keep their memory if none is new."""
        self._layers = list(layers)
        if not self._is_current():
            self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Takes what is there now for right."""
        self._held = statistics(self._layers)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for each in self._held:
            # .data: written without telling autograd, as the layers' own kernels do. In train mode
            # no backward reads them, but it would find that they had changed and refuse.
            local = each.to_local() if hasattr(each, "to_local") else each  # type: ignore[operator]
            kinds.setdefault((each.device, each.dtype), []).append(local.data.view(-1))
        self._blocks = [_Block(buffers) for buffers in kinds.values()]

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step. What is not finite goes back even if the step was taken.

        (A GradScaler may have dropped the step before without a word, or the loop itself have.)

        Args:
            skipped: where the host knows; else a 0-d float32 of exactly 0 or 1, which is not read.
        """
        if not self._is_current():
            self.keep()  # moved to another device, say: there is nothing to go back to
            return
        for block in self._blocks:
            if skipped is True:
                block.put_back()
            else:
                block.take(None if skipped is False else skipped)

    def _is_current(self) -> bool:
        now = statistics(self._layers)
        return len(now) == len(self._held) and all(map(_same, now, self._held))


def statistics(layers: Sequence[nn.Module]) -> list[Tensor]:
    """The tensors in question, layer after layer."""
    found = []
    for layer in layers:
        buffers = layer._buffers
        for name in NAMES:
            each = buffers.get(name)
            if each is not None and not isinstance(each, UninitializedBuffer):
                found.append(each)
    return found


class _Block:
    """Statistics of one dtype on one device.

    Args:
        buffers: 1-d views of them.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._sizes = [each.numel() for each in buffers]
        self._kept = torch.cat(buffers)
        self._now = torch.empty_like(self._kept)

    def put_back(self) -> None:
        """Writes what was kept into the layers."""
        kept = list(self._kept.split(self._sizes))
        torch._foreach_copy_(self._buffers, kept)  # pyright: ignore[reportPrivateImportUsage]

    def take(self, skipped: Tensor | None) -> None:
        """Keeps what is there now, but for what is to go back."""
        torch.cat(self._buffers, out=self._now)
        if skipped is None and (not self._now.is_floating_point() or self._is_calm()):
            self._kept, self._now = self._now, self._kept
            return
        back = ~torch.isfinite(self._now)
        if skipped is not None:
            back |= skipped.to(back.device, non_blocking=True) > 0
        torch.where(back, self._kept, self._now, out=self._kept)
        self.put_back()

    def _is_calm(self) -> bool:
        """Whether everything is seen to be finite without waiting for a device."""
        if self._now.device.type != "cpu":
            return False
        return math.isfinite(self._now.sum(dtype=torch.float32).numpy())


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b
