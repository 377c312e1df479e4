"""Restores batch statistics (`running_mean`, ...) after a skipped step.

A forward pass in train mode updates the statistics before the step is judged, and a NaN would stay.
After each step they are copied into one flat tensor for each dtype and device, which takes few
kernels.

Rejected: a hook in the forward pass, which would be traced into a compiled model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from healcore.torch import gradients

BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""torch's names of these buffers, which other libraries' layers use too."""


class BatchStatistics:
    """The batch statistics of some layers, and their values after the last step that was kept.

    Args:
        layers: the layers that one optimizer trains. Layers without batch statistics are ignored.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [layer for layer in layers if {*BUFFER_NAMES} & {*layer._buffers}]
        self._buffers: list[Tensor] = []
        self._blocks: list[tuple[list[Tensor], Tensor]] = []
        """For each dtype and device: 1-d views of the buffers, and their saved values."""
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        self._buffers = statistics(self._layers)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in self._buffers:
            # Like the layers' own kernels, writes to .data bypass autograd's version counter. A
            # backward pass would raise otherwise, although it reads no buffer in train mode.
            local = buffer
            if hasattr(buffer, "to_local"):
                local = buffer.to_local()  # type: ignore[operator]
            kinds.setdefault((buffer.device, buffer.dtype), []).append(local.data.view(-1))
        self._blocks = [(buffers, torch.cat(buffers)) for buffers in kinds.values()]

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the values after a skip, otherwise saves the values.

        Non-finite values are always restored, because a GradScaler or the loop may have dropped the
        previous step without a call, and loaded weights have statistics of their own.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        current = statistics(self._layers)
        if [*map(id, current)] != [*map(id, self._buffers)]:
            # For example moved to another device: there is nothing to restore.
            self.save()
            return
        for i, (buffers, saved) in enumerate(self._blocks):
            if skipped is not True:
                now = torch.cat(buffers)
                if skipped is False and _is_finite(now):
                    self._blocks[i] = (buffers, now)
                    continue
                restored = ~torch.isfinite(now)
                if isinstance(skipped, Tensor):
                    restored |= gradients.to_device(skipped, now.device) > 0
                saved = torch.where(restored, saved, now)
                self._blocks[i] = (buffers, saved)
            parts = list(saved.split([buffer.numel() for buffer in buffers]))
            torch._foreach_copy_(buffers, parts)  # pyright: ignore[reportPrivateImportUsage]


def _is_finite(values: Tensor) -> bool:
    """Whether all values are finite; always False for floats on an accelerator: no sync."""
    if not values.is_floating_point():
        return True
    return values.is_cpu and math.isfinite(values.sum(dtype=torch.float32).numpy())


def statistics(layers: Sequence[nn.Module]) -> list[Tensor]:
    """The buffers named in `BUFFER_NAMES`, such as the running mean and variance.

    Args:
        layers: the layers with batch statistics.

    Returns:
        The buffers layer by layer, without buffers of lazy modules that have no shape yet.
    """
    buffers: list[Tensor] = []
    for layer in layers:
        for name in BUFFER_NAMES:
            buffer = layer._buffers.get(name)
            if buffer is not None and not isinstance(buffer, UninitializedBuffer):
                buffers.append(buffer)
    return buffers
