"""What a forward pass writes into buffers: undone with a skipped step, and part of a checkpoint.

LayerBuffers     the floating buffers of the layers that one optimizer trains
UnsavedBuffers   the written buffers that `state_dict()` leaves out
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.live_state import State, modules

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""torch's names of batch statistics, in which Inf is as bad as NaN. In a mask it is not."""
SMALL_BYTES = 1 << 18
"""Size in bytes up to which every buffer is copied and saved, also in a very small model."""

_Kind: TypeAlias = tuple[torch.device, torch.dtype, bool, bool]
"""Device, dtype, whether the buffers are batch statistics, and whether each is large."""


class _Buffer(NamedTuple):
    """A buffer of a layer."""

    layer: int
    """The number of the layer."""
    name: str
    """The buffer's key in `table`."""
    shape: torch.Size
    """The shape of `tensor` when it was found: an observer resizes its buffers."""
    table: dict[str, Any]
    """The buffers of the layer, `layer._buffers`."""
    tensor: Tensor


class _Block:
    """The buffers of one kind after a step.

    Args:
        buffers: the buffers, at least one.

    Attributes:
        buffers: the buffers.
        versions: number of writes to each buffer that torch has counted.
        values: a copy of their values, one buffer after the other.
    """

    def __init__(self, buffers: Sequence[_Buffer]) -> None:
        self.buffers = buffers
        self.versions = [buffer.tensor._version for buffer in buffers]
        self.values = torch.cat([buffer.tensor.flatten() for buffer in buffers])

    def parts(self, values: Tensor) -> list[Tensor]:
        """Values of all buffers, in the shape of each buffer."""
        sizes = [buffer.shape.numel() for buffer in self.buffers]
        parts = zip(values.split(sizes), self.buffers, strict=True)
        return [part.view(buffer.shape) for part, buffer in parts]

    def layers(self) -> Tensor:
        """The number of the layer of each value."""
        numbers = torch.tensor([buffer.layer for buffer in self.buffers])
        sizes = torch.tensor([buffer.shape.numel() for buffer in self.buffers])
        return gradients.to_device(numbers.repeat_interleave(sizes), self.values.device)

    def fits(self, other: _Block) -> bool:
        """Whether another block has the same layers, names and shapes."""
        return [buffer[:3] for buffer in self.buffers] == [buffer[:3] for buffer in other.buffers]

    def is_bad(self) -> Tensor:
        """Whether each value is NaN, or Inf in batch statistics."""
        if self.buffers[0].name in STATISTICS:
            return ~self.values.isfinite()
        return self.values.isnan()

    def is_written(self) -> bool:
        """Whether torch has counted a write since then, or another tensor is in a place.

        torch counts no write to `buffer.data`, and none by the kernels of its norm layers.
        """
        for buffer, version in zip(self.buffers, self.versions, strict=True):
            now: Any = buffer.table.get(buffer.name)
            if now is not buffer.tensor or now._version != version:
                return True
        return False


class LayerBuffers:
    """The floating buffers of the layers that one optimizer trains.

    A forward pass writes batch statistics, observers of quantization, averages and codebooks before
    the step is judged. A skipped step restores them to their values after the previous step:

        step n ends ─► save ─► forward pass n + 1 writes ─► step n + 1 is skipped ─► restore

    A layer with new NaN is always restored as a whole: a batch that overflows the variance has
    ruined the finite mean too. The step itself may be finite, or a loop may skip a batch with NaN
    without a step.

    Integers and flags stay, because most of them are settings of the program. Buffers larger than
    all `parameters` together stay too: a copy would take longer than the step of the optimizer.

    Args:
        layers: the layers.
        parameters: the parameters that the optimizer trains.
    """

    def __init__(self, layers: Sequence[nn.Module], parameters: Iterable[Tensor]) -> None:
        self._layers = layers
        self._largest = _size_limit(parameters)
        self._tensors: list[Tensor | None] = []
        """All buffers of the layers at the last look, and their shapes."""
        self._shapes: list[Any] = []
        self._kinds: dict[_Kind, list[_Buffer]] = {}
        """Those of them that are restored."""
        self._saved: dict[_Kind, _Block] = {}
        self.save()

    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        self._saved = self._read()

    def keep_written(self) -> None:
        """Saves what the program has written since the last step, except for batch statistics.

        Only a forward pass writes these. An exception may have ended it, and a restart repeats it.
        """
        before = self._saved
        for block in before.values():
            if block.is_written():
                self.end(False)
                self._saved.update({kind: block for kind, block in before.items() if kind[2]})
                return

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the values after a skip, otherwise saves the values. No sync.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        if not self._layers:
            return  # most models have no buffers
        now = self._read()
        blocks = now.values()
        if skipped is False and all(b.values.is_cpu and b.values.sum().isfinite() for b in blocks):
            self._saved = now  # the usual case
            return
        pairs: list[tuple[_Block, _Block]] = []
        for kind, saved in self._saved.items():
            block = now.get(kind)
            if block is not None and saved.fits(block):
                pairs.append((saved, block))
            elif bool(skipped):
                # Its first forward pass has given a buffer its shape, or there is one more.
                for buffer, part in zip(saved.buffers, saved.parts(saved.values), strict=True):
                    buffer.table[buffer.name] = part.clone()
        # For each layer, 0 if it is kept.
        restored = torch.as_tensor(skipped, dtype=torch.float32).expand(len(self._layers)).clone()
        for saved, block in pairs:
            is_bad = block.is_bad() & ~saved.is_bad()
            restored = gradients.to_device(restored, is_bad.device)
            restored.index_add_(0, block.layers(), is_bad.float())
        for saved, block in pairs:
            restored = gradients.to_device(restored, block.values.device)
            is_restored = restored[block.layers()] > 0
            values = block.parts(torch.where(is_restored, saved.values, block.values))
            # A write to .data counts as no write for autograd, like that of a layer's own kernel.
            # A tensor that the program has put there is not written: it may be the batch.
            targets = [buffer.tensor.data for buffer in saved.buffers]
            torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]
            for buffer in saved.buffers:
                buffer.table[buffer.name] = buffer.tensor
        self._saved = self._read()

    def _read(self) -> dict[_Kind, _Block]:
        """The current buffers, by kind."""
        tensors = [tensor for layer in self._layers for tensor in layer._buffers.values()]
        shapes = [None if tensor is None else tensor.shape for tensor in tensors]
        is_known = shapes == self._shapes
        # It takes long to ask a tensor for its properties, so they are looked at once.
        if not (is_known and all(map(operator.is_, tensors, self._tensors))):
            self._tensors, self._shapes = tensors, shapes
            self._kinds = self._find()
        blocks: dict[_Kind, _Block] = {}
        for kind, buffers in self._kinds.items():
            block = self._saved.get(kind)
            # On a CPU the copy of large tables of constants would take long.
            is_same = kind[3] and block is not None and block.buffers is buffers
            if block is None or not is_same or block.is_written():
                block = _Block(buffers)
            blocks[kind] = block
        return blocks

    def _find(self) -> dict[_Kind, list[_Buffer]]:
        """The buffers that are restored, by kind."""
        found: dict[_Kind, list[_Buffer]] = {}
        for number, layer in enumerate(self._layers):
            for name, tensor in layer._buffers.items():
                is_statistic = name in STATISTICS
                if (
                    tensor is not None
                    and _is_plain(tensor)
                    and (tensor.is_floating_point() or is_statistic)
                    and tensor.dtype.itemsize > 1  # float8 cannot be compared
                    and tensor.nbytes <= self._largest
                ):
                    is_large = tensor.is_cpu and tensor.nbytes > SMALL_BYTES
                    kind = tensor.device, tensor.dtype, is_statistic, is_large
                    buffer = _Buffer(number, name, tensor.shape, layer._buffers, tensor)
                    found.setdefault(kind, []).append(buffer)
        return found


def _is_plain(value: Tensor) -> bool:
    """Whether a buffer is a dense tensor with data, which can be copied and written."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_quantized or value.is_inference())


def _size_limit(parameters: Iterable[Tensor | None]) -> int:
    """Size in bytes of the largest buffer that is copied or saved."""
    sizes = [p.nbytes for p in parameters if p is not None and not is_lazy(p)]
    return max(SMALL_BYTES, sum(sizes))


def buffers_of(state: State, healings: Mapping[str, Healing]) -> dict[str, LayerBuffers]:
    """The buffers of a whole state.

    A layer without trained parameters belongs to the optimizer of the nearest enclosing module with
    trained parameters. The buffers of layers that no optimizer trains (a weight average) stay.

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.

    Returns:
        Optimizer name -> the buffers of the layers that the optimizer trains. An optimizer in
        observe mode, which changes nothing, has none.
    """
    owners: dict[int, str] = {}  # id of a parameter -> name of its optimizer
    for name, healing in healings.items():
        if healing.engine.mode != "observe":
            owners.update((id(p), name) for p in gradients.parameters(healing.optimizer))
    layers: dict[str, list[nn.Module]] = {name: [] for name in healings}
    owner_at: dict[str, str | None] = {}
    for path, module in modules(state).items():
        owner = owner_at.get(path.rpartition(".")[0])
        owner = next((owners[id(p)] for p in module.parameters() if id(p) in owners), owner)
        owner_at[path] = owner
        if owner is not None and module._buffers:
            layers[owner].append(module)
    return {
        name: LayerBuffers(own, gradients.parameters(healings[name].optimizer))
        for name, own in layers.items()
    }


class UnsavedBuffers:
    """The written buffers of a state that are not in `state_dict()`. A checkpoint saves them.

    torch leaves out buffers with `persistent=False`. Most of them are constants of the program, for
    example the frequencies of rotary embeddings, which the next start computes again. So a buffer
    is saved if its value differs from the value at the start. `load_state_dict` restores the value
    at the start if a checkpoint lacks the buffer. With several ranks all buffers are saved, because
    a checkpoint has the same arrays on each rank.

    A buffer larger than all parameters together is never saved. A program that keeps such a cache
    or data set out of `state_dict()` does not want it in each checkpoint.

    Args:
        state: the state of the run.
        saves_all: returns whether all buffers are saved, as with several ranks.
    """

    optional = True
    """Checkpoints of earlier versions lack this item, and can be restored."""

    def __init__(self, state: State, saves_all: Callable[[], bool]) -> None:
        self._state = state
        self._saves_all = saves_all
        parameters = [module._parameters.values() for module in modules(state).values()]
        self._largest = _size_limit(p for each in parameters for p in each)
        self._first: dict[str, Tensor] = {}
        """Path -> this rank's value at the start, on the host."""
        for path, value in self._values():
            self._first[path] = gradients.local_part(value).detach().to("cpu", copy=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers to save, not copied.

        Returns:
            Path, such as "model.layers.0.center" -> value. A sync on an accelerator.
        """
        saves_all = self._saves_all()
        found: dict[str, Tensor] = {}
        for path, value in self._values():
            own = gradients.local_part(value)
            first = self._first.get(path)
            if saves_all or first is None or not torch.equal(own.cpu(), first):
                found[path] = value
        return found

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restores the values of a checkpoint, in the memory of the current tensors if they fit.

        Args:
            saved: what `state_dict` has returned. A buffer that it lacks gets its first value.
        """
        live = modules(self._state)
        for path, value in {**self._first, **saved}.items():
            place, _, name = path.rpartition(".")
            module = live.get(place)
            if module is None:
                continue
            now = module._buffers.get(name)
            if now is not None:
                part, own = gradients.local_part(now), gradients.local_part(value)
                if part.shape == own.shape and part.dtype == own.dtype:
                    if not torch.equal(part.cpu(), own.cpu()):
                        part.copy_(own)
                    continue
            # The forward pass of the saved run has replaced or registered it.
            for tensor in (*module.parameters(), now):
                if tensor is not None:
                    value = value.to(tensor.device)
            module.register_buffer(name, value.clone(), persistent=False)

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        """Yields path and value of each buffer to save that `state_dict()` leaves out."""
        for place, module in modules(self._state).items():
            for name in sorted(module._non_persistent_buffers_set & module._buffers.keys()):
                value = module._buffers[name]
                if value is None or not _is_plain(gradients.local_part(value)):
                    continue
                if value.nbytes <= self._largest:  # of a DTensor, as a whole: equal on all ranks
                    yield f"{place}.{name}", value
