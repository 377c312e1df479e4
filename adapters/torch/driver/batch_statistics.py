"""Restores batch statistics (`running_mean`, ...) of torch's layers after a skipped step.

A forward pass in train mode updates the statistics before the step is judged, and a NaN would stay.
After each step they are copied into one flat tensor for each dtype and device, which takes few
kernels.

Rejected: a hook in the forward pass, which would be traced into a compiled model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from healcore.torch import gradients

BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""torch's names of these buffers, which other libraries' layers use too."""


@dataclasses.dataclass
class Block:
    """Values of buffers of one dtype and device, 1-d, one buffer after the other.

    Attributes:
        modules: the number of the module of each buffer.
        sizes: the number of values of each buffer.
        saved: the values after the last step that was kept.
        now: the values now.
        inf_is_bad: whether Inf is as bad as NaN, as in statistics. It is not in a mask.
    """

    modules: list[int]
    sizes: list[int]
    saved: Tensor
    now: Tensor
    inf_is_bad: bool = True

    @functools.cached_property
    def module_of(self) -> Tensor:
        """The number of the module of each value, or of all values of a single buffer."""
        of = torch.tensor(self.modules)
        if len(self.modules) > 1:
            of = of.repeat_interleave(torch.tensor(self.sizes))
        return of.to(self.saved.device, non_blocking=True)

    def parts(self) -> list[Tensor]:
        """The saved values of each buffer."""
        return list(self.saved.split(self.sizes))

    def is_sound(self) -> bool:
        """Whether no value is bad now; always False for floats on an accelerator: no sync."""
        if not (self.now.is_floating_point() or self.now.is_complex()):
            return True
        return self.now.is_cpu and not self.bad(self.now.sum())

    def bad(self, values: Tensor) -> Tensor:
        """Which values are bad."""
        return ~values.isfinite() if self.inf_is_bad else values.isnan()


def keep_or_restore(blocks: Sequence[Block], modules: int, skipped: bool | Tensor) -> None:
    """Makes `saved` of each block what its buffers are to be after a step, without a sync.

    A module with new bad values is restored as a whole: a batch that overflows the variance has
    ruined the finite mean too.

    Args:
        blocks: the values. Their tensors are not written.
        modules: number of modules.
        skipped: whether the step was skipped.
    """
    if skipped is True:
        return
    restored: dict[torch.device, Tensor] = {}  # for each module, above 0 if it is restored
    for block in blocks:
        device = block.now.device
        if device not in restored:
            restored[device] = torch.zeros(modules, device=device)
            if isinstance(skipped, Tensor):
                restored[device] += gradients.to_device(skipped, device)
        spoilt = block.bad(block.now) & ~block.bad(block.saved)
        if len(block.modules) == 1:
            spoilt = spoilt.any().view(1)
        restored[device].index_add_(0, block.module_of, spoilt.float())
    for block in blocks:
        is_restored = restored[block.now.device][block.module_of] > 0
        block.saved = torch.where(is_restored, block.saved, block.now)


class BatchStatistics:
    """The batch statistics of some layers, and their values after the last step that was kept.

    Args:
        layers: layers that one optimizer trains, of which a forward pass writes these buffers only.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._buffers: list[Tensor] = []
        self._blocks: list[tuple[list[Tensor], Block]] = []
        """For each dtype and device: 1-d views of the buffers, and their values."""
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        found = statistics(self._layers)
        self._buffers = [buffer for _, buffer in found]
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for number, buffer in found:
            # Like the layers' own kernels, writes to .data bypass autograd's version counter. A
            # backward pass would raise otherwise, although it reads no buffer in train mode.
            local = buffer
            if hasattr(buffer, "to_local"):
                local = buffer.to_local()  # type: ignore[operator]
            flat = local.data.view(-1)
            kinds.setdefault((buffer.device, buffer.dtype), []).append((number, flat))
        self._blocks = []
        for parts in kinds.values():
            modules = [number for number, _ in parts]
            buffers = [flat for _, flat in parts]
            sizes = [flat.numel() for flat in buffers]
            saved = torch.cat(buffers)
            self._blocks.append((buffers, Block(modules, sizes, saved, saved)))

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the values after a skip, otherwise saves the values.

        A layer with new NaN or Inf is always restored: the loss of its batch may be finite, or a
        GradScaler or the loop may have dropped the previous step without a call.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        current = [buffer for _, buffer in statistics(self._layers)]
        if [*map(id, current)] != [*map(id, self._buffers)]:
            # For example moved to another device: there is nothing to restore.
            self.save()
            return
        blocks = [block for _, block in self._blocks]
        if skipped is not True:
            for buffers, block in self._blocks:
                block.now = torch.cat(buffers)
        if skipped is False and all(block.is_sound() for block in blocks):
            for block in blocks:
                block.saved = block.now
            return
        keep_or_restore(blocks, len(self._layers), skipped)
        for buffers, block in self._blocks:
            torch._foreach_copy_(buffers, block.parts())  # pyright: ignore[reportPrivateImportUsage]


def statistics(layers: Sequence[nn.Module]) -> list[tuple[int, Tensor]]:
    """The buffers named in `BUFFER_NAMES`, such as the running mean and variance.

    Args:
        layers: the layers with batch statistics.

    Returns:
        The number of the layer and the buffer, layer by layer, without buffers of lazy modules that
        have no shape yet.
    """
    buffers: list[tuple[int, Tensor]] = []
    for number, layer in enumerate(layers):
        for name in BUFFER_NAMES:
            buffer = layer._buffers.get(name)
            if buffer is not None and not isinstance(buffer, UninitializedBuffer):
                buffers.append((number, buffer))
    return buffers
