"""`LayerBuffers`: the floating buffers that a skipped step of one optimizer restores.

A forward pass writes into buffers of its layers before the step is judged. Two mechanisms restore
them, because batch statistics are written at every step, and other buffers hardly ever:

    BatchStatistics    torch's norm layers            copied together, at every step
    WrittenBuffers     every other layer              each buffer copied if it was written

Buffers that one forward pass of a layer writes are restored together. So a layer is in one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.batch_statistics import BUFFER_NAMES, BatchStatistics
from healcore.torch.driver.written_buffers import WrittenBuffers
from healcore.torch.live_state import State


class LayerBuffers:
    """The buffers of the layers that one optimizer trains.

    A skipped step of the optimizer restores the buffers to their values after its previous step.
    The buffers of layers that no optimizer trains (a weight average) stay.

        step n ends ─► save ─► forward pass n + 1 writes ─► step n + 1 is skipped ─► restore

    Args:
        layers: the layers that the optimizer trains.
        parameters: the parameters that the optimizer trains.
    """

    def __init__(self, layers: Sequence[nn.Module], parameters: Sequence[Tensor]) -> None:
        self._statistics = BatchStatistics([layer for layer in layers if _is_norm(layer)])
        others = [layer for layer in layers if not _is_norm(layer)]
        self._written = WrittenBuffers(others, parameters)

    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        self._written.save()
        self._statistics.save()

    def keep_written(self) -> None:
        """Saves what the program has written into other buffers since the last step."""
        self._written.keep()

    def on_step_ended(self, skipped: bool | Tensor) -> None:
        """Ends a judged step, see `StepListener.ended`."""
        self.end(skipped)
        self._written.compare_contents()

    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the values after a skip, otherwise saves the values.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        if isinstance(skipped, Tensor) and skipped.is_cpu:
            skipped = bool(skipped)
        self._written.end(skipped)
        self._statistics.end(skipped)


def buffers_of(state: State, healings: Mapping[str, Healing]) -> dict[str, LayerBuffers]:
    """The buffers of a whole state.

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.

    Returns:
        Optimizer name -> the buffers of the layers that the optimizer trains, if there are any. An
        optimizer in observe mode, which changes nothing, is not in the result.
    """
    healed: dict[str, Healing] = {}
    for name, healing in healings.items():
        if healing.engine.mode != "observe":
            healed[name] = healing
    found: dict[str, LayerBuffers] = {}
    for name, layers in layers_of(state, healed).items():
        found[name] = LayerBuffers(layers, gradients.parameters(healed[name].optimizer))
    return found


def _is_norm(layer: nn.Module) -> bool:
    """Whether it is a norm layer of torch, without a buffer of somebody else.

    A layer derived from it may replace its statistics by other tensors.
    """
    names = {name for name, buffer in layer._buffers.items() if _is_restored(name, buffer)}
    return type(layer).__module__.startswith("torch.") and names <= {*BUFFER_NAMES}


def _is_restored(name: str, buffer: Tensor | None) -> bool:
    """Whether a skipped step restores this buffer, if its layer is trained."""
    if buffer is None:
        return False
    if name in BUFFER_NAMES:
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
