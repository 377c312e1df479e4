"""Restores batch statistics (`running_mean`, ...) and other buffers after a skipped step.

A forward pass in train mode updates them before the step is judged, and a NaN would stay. After
each step they are copied into one flat tensor for each dtype and device, which takes few kernels.
Rejected: a hook in the forward pass, which would be traced into a compiled model.
`WrittenBuffers` restores the others, such as the observers of quantization-aware training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.written_buffers import WrittenBuffers
from healcore.torch.live_state import State

NAMES = ("running_mean", "running_var", "num_batches_tracked")
"""torch's names of these buffers, which other libraries' layers use too."""


class BatchStatistics:
    """The batch statistics, and other floating buffers, of the layers that one optimizer trains.

    A skipped step of the optimizer restores them to their values after its previous step. Layers
    that no optimizer trains (a weight average) stay.

        step n ends ─► save ─► forward pass n + 1 writes ─► step n + 1 is skipped ─► restore

    Args:
        name: name of the optimizer in the state.
        layers: the layers that the optimizer trains.
        healing: the handle of the optimizer.

    Attributes:
        name: name of the optimizer in the state.
    """

    def __init__(self, name: str, layers: Sequence[nn.Module], healing: Healing) -> None:
        self.name = name
        self._written = WrittenBuffers(layers, NAMES, gradients.parameters(healing.optimizer))
        self._layers = [layer for layer in layers if {*NAMES} & {*layer._buffers}]
        self._buffers: list[Tensor] = []
        self._blocks: list[tuple[list[Tensor], Tensor]] = []
        """For each dtype and device: 1-d views of the buffers, and their saved values."""
        self.save()

    @classmethod
    def of(cls, state: State, healings: Mapping[str, Healing]) -> list[BatchStatistics]:
        """The batch statistics of a whole state.

        Args:
            state: the state of the run.
            healings: the handle of each optimizer, by name.

        Returns:
            One object for each optimizer with such layers. None in observe mode, which changes
            nothing.
        """
        healed: dict[str, Healing] = {}
        for name, healing in healings.items():
            if healing.engine.mode != "observe":
                healed[name] = healing
        found: list[BatchStatistics] = []
        for name, layers in layers_of(state, healed).items():
            found.append(cls(name, layers, healed[name]))
        return found

    @torch.no_grad()
    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        self._written.save()
        self._save_statistics()

    def _save_statistics(self) -> None:
        """Saves the statistics, and not the other buffers."""
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

    def keep_written(self) -> None:
        """Saves what the program has written into other buffers since the last step."""
        self._written.keep()

    def on_step_ended(self, skipped: bool | Tensor) -> None:
        """Ends a judged step, see `StepListener.ended`."""
        self.end(skipped)
        self._written.compare_contents()

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the values after a skip, otherwise saves the values.

        Non-finite values are always restored, because a GradScaler or the loop may have dropped the
        previous step without a call, and loaded weights have statistics of their own.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        self._written.end(skipped)
        current = statistics(self._layers)
        if [*map(id, current)] != [*map(id, self._buffers)]:
            # For example moved to another device: there is nothing to restore.
            self._save_statistics()
            return
        for i, (buffers, saved) in enumerate(self._blocks):
            if skipped is not True:
                now = torch.cat(buffers)
                if skipped is False and _is_finite(now):
                    self._blocks[i] = (buffers, now)
                    continue
                restored = ~torch.isfinite(now)
                if isinstance(skipped, Tensor):
                    restored |= gradients.moved(skipped, now.device) > 0
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
    """The buffers named in `NAMES`, such as the running mean and variance.

    Args:
        layers: the layers with batch statistics.

    Returns:
        The buffers layer by layer, without buffers of lazy modules that have no shape yet.
    """
    buffers: list[Tensor] = []
    for layer in layers:
        for name in NAMES:
            buffer = layer._buffers.get(name)
            if buffer is not None and not isinstance(buffer, UninitializedBuffer):
                buffers.append(buffer)
    return buffers


def _is_restored(name: str, buffer: Tensor | None) -> bool:
    """Whether a skipped step restores this buffer, if its layer is trained."""
    if buffer is None:
        return False
    if name in NAMES:
        return True
    return type(buffer) is Tensor and (buffer.is_floating_point() or buffer.is_complex())


def layers_of(state: State, healings: Mapping[str, Healing]) -> dict[str, list[nn.Module]]:
    """Layers with batch statistics or other floating buffers.

    A layer without trained parameters belongs to the optimizer of the nearest enclosing module with
    trained parameters.

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.

    Returns:
        Name of an optimizer -> its layers, in the order of the state.
    """
    owners: dict[int, str] = {}  # id of a parameter -> name of its optimizer
    for name, healing in healings.items():
        for p in gradients.parameters(healing.optimizer):
            owners[id(p)] = name
    if not owners:
        return {}
    found: dict[str, list[nn.Module]] = {}
    seen: set[int] = set()
    for root in state.values():
        if not isinstance(root, nn.Module):
            continue
        for path, layer in root.named_modules():
            if id(layer) in seen:
                continue
            if not any(_is_restored(name, each) for name, each in layer._buffers.items()):
                continue
            seen.add(id(layer))
            owner = _owner_of(root, path, owners)
            if owner is not None:
                found.setdefault(owner, []).append(layer)
    return found


def _owner_of(root: nn.Module, path: str, owners: Mapping[int, str]) -> str | None:
    """The optimizer of the module at this path, or else of the nearest enclosing module."""
    while True:
        for p in root.get_submodule(path).parameters():
            if id(p) in owners:
                return owners[id(p)]
        if not path:
            return None
        path = path.rpartition(".")[0]
