"""Restores batch statistics (`running_mean`, ...) and other buffers after a skipped step.

A forward pass in train mode updates them before the step is judged, and a NaN would stay. After
each step they are copied into one flat tensor for each dtype and device, which takes few kernels.
Rejected: a hook in the forward pass, which would be traced into a compiled model.
`WrittenBuffers` restores the others, such as the observers of quantization-aware training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.written_buffers import WrittenBuffers

NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""torch's names of these buffers, which other libraries' layers use too."""


class BatchStatistics:
    """The batch statistics, and other floating buffers, of the layers that one optimizer trains.

    A skipped step of the optimizer restores them to their values after its previous step. Layers
    that no optimizer trains (a weight average) stay.
    """

    def __init__(self, layers: Sequence[nn.Module], healing: Healing) -> None:
        self._written = WrittenBuffers(layers, NAMES, gradients.parameters(healing.optimizer))
        self._layers = [layer for layer in layers if {*NAMES} & {*layer._buffers}]
        self._buffers: list[Tensor] = []
        self._blocks: list[tuple[list[Tensor], Tensor]] = []
        """For each dtype and device: 1-d views of the buffers, and their saved values."""
        self.save()
        healing.healed_step.on_ended = self._on_ended

    @classmethod
    def of(cls, state: Mapping[str, Any], healings: Mapping[str, Healing]) -> list[BatchStatistics]:
        """The batch statistics of a whole state; none in observe mode, or without such layers."""
        healed = {n: h for n, h in healings.items() if h.engine.mode != "observe"}
        return [cls(layers, healed[n]) for n, layers in layers_of(state, healed).items()]

    @torch.no_grad()
    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        self._written.save()
        self._save_statistics()

    def _save_statistics(self) -> None:
        """Saves the statistics, and not the other buffers."""
        self._buffers = statistics(self._layers)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for each in self._buffers:
            # Like the layers' own kernels, writes to .data bypass autograd's version counter. A
            # backward pass would raise otherwise, although it reads no buffer in train mode.
            local = each.to_local() if hasattr(each, "to_local") else each  # type: ignore[operator]
            kinds.setdefault((each.device, each.dtype), []).append(local.data.view(-1))
        self._blocks = [(buffers, torch.cat(buffers)) for buffers in kinds.values()]

    def keep_written(self) -> None:
        """Saves what the program has written into other buffers since the last step."""
        self._written.keep()

    def _on_ended(self, skipped: bool | Tensor) -> None:
        self.end(skipped)
        self._written.compare_contents()

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores after a skip (a bool, or a 0-d float32 of 0 or 1), else saves.

        Non-finite values are always restored, because a GradScaler or the loop may have dropped the
        previous step without a call, and loaded weights have statistics of their own.
        """
        self._written.end(skipped)
        now = statistics(self._layers)
        if [*map(id, now)] != [*map(id, self._buffers)]:
            # For example moved to another device: there is nothing to restore.
            self._save_statistics()
            return
        for i, (buffers, saved) in enumerate(self._blocks):
            if skipped is not True:
                now = torch.cat(buffers)
                if skipped is False and _is_finite(now):
                    self._blocks[i] = buffers, now
                    continue
                restored = ~torch.isfinite(now)
                if isinstance(skipped, Tensor):
                    restored |= gradients.moved(skipped, now.device) > 0
                saved = torch.where(restored, saved, now)
                self._blocks[i] = buffers, saved
            parts = list(saved.split([each.numel() for each in buffers]))
            torch._foreach_copy_(buffers, parts)  # pyright: ignore[reportPrivateImportUsage]


def _is_finite(values: Tensor) -> bool:
    """Whether all values are finite; always False for floats on an accelerator: no sync."""
    if not values.is_floating_point():
        return True
    return values.is_cpu and math.isfinite(values.sum(dtype=torch.float32).numpy())


def statistics(layers: Sequence[nn.Module]) -> list[Tensor]:
    """The buffers named in `NAMES`, layer by layer."""
    found = [layer._buffers.get(name) for layer in layers for name in NAMES]
    return [e for e in found if e is not None and not isinstance(e, UninitializedBuffer)]


def _is_restored(name: str, buffer: Tensor | None) -> bool:
    """Whether a skipped step restores this buffer, if its layer is trained."""
    if buffer is None or name in NAMES:
        return buffer is not None
    return type(buffer) is Tensor and (buffer.is_floating_point() or buffer.is_complex())


def layers_of(
    state: Mapping[str, Any], healings: Mapping[str, Healing]
) -> dict[str, list[nn.Module]]:
    """Layers with batch statistics or other floating buffers, by the name of their optimizer.

    A layer without trained parameters belongs to the optimizer of the nearest enclosing module with
    trained parameters.
    """
    owners = {
        id(p): name for name, heal in healings.items() for p in gradients.parameters(heal.optimizer)
    }
    found: dict[str, list[nn.Module]] = {}
    seen: set[int] = set()
    for root in state.values() if healings else ():
        for path, layer in root.named_modules() if isinstance(root, nn.Module) else ():
            buffers = layer._buffers.items()
            if id(layer) in seen or not any(_is_restored(n, each) for n, each in buffers):
                continue
            seen.add(id(layer))
            owner = next(filter(None, _trainers(root, path, owners)), None)
            if owner is not None:
                found.setdefault(owner, []).append(layer)
    return found


def _trainers(root: nn.Module, path: str, owners: Mapping[int, str]) -> Iterator[str | None]:
    """Yields the optimizer of the module at this path, then of each enclosing module, or None."""
    while True:
        params = root.get_submodule(path).parameters()
        yield next((owners[id(p)] for p in params if id(p) in owners), None)
        if not path:
            return
        path = path.rpartition(".")[0]
