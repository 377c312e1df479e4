"""What a forward pass writes into buffers: undone with a skipped step, and part of a checkpoint.

LayerBuffers     the floating buffers of the layers that one optimizer trains
UnsavedBuffers   the written buffers that `state_dict()` leaves out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.live_state import State

COUNT = "num_batches_tracked"
"""torch's name of the number of batches in the statistics, which is restored with them."""
STATISTICS = ("running_mean", "running_var")
"""torch's names of batch statistics, in which Inf is as bad as NaN. In a mask it is not."""
SMALL_BYTES = 1 << 18
"""Size in bytes up to which a buffer is copied at each step, even if nothing seems to write it."""


class _Buffer:
    """One buffer of a layer, and its value after the last step.

    Attributes:
        layer: the number of the layer.
        table: the buffers of the layer, `layer._buffers`.
        name: the buffer's key in `table`.
        tensor: the buffer at the last `note`, or None before it.
        version: number of writes to `tensor` at the last `note`.
        shape: shape of `tensor` at the last `note`.
        saved: a flat copy of its value, or None for a buffer that seems constant.
    """

    def __init__(self, layer: int, table: dict[str, Any], name: str) -> None:
        self.layer = layer
        self.table = table
        self.name = name
        self.tensor: Any = None
        self.saved: Any = None

    def is_written(self) -> bool:
        """Whether torch has counted a write since the last `note`, or another tensor is there.

        torch counts no write to `buffer.data`, and none by the kernels of its norm layers.
        """
        if self.name not in self.table:
            return False
        now = self.table[self.name]
        return now is not self.tensor or now._version != self.version

    def note(self, saved: Tensor) -> None:
        """Notes the current tensor and its value. A write after this call counts as a change."""
        self.tensor = self.table[self.name]
        self.version = self.tensor._version
        self.shape = self.tensor.shape
        self.saved = saved


class LayerBuffers:
    """The floating buffers of the layers that one optimizer trains.

    A forward pass writes batch statistics, observers of quantization, averages and codebooks before
    the step is judged. A skipped step restores them to their values after the previous step:

        step n ends ─► save ─► forward pass n + 1 writes ─► step n + 1 is skipped ─► restore

    A layer with new NaN is always restored as a whole: a batch that overflows the variance has
    ruined the finite mean too. The step itself may be finite, or a loop may skip a batch with NaN
    without a step.

    Every buffer that may change is copied at each step. Large buffers hardly ever change (tables of
    positions), so their content is compared once, at the second step. A buffer that seems constant
    is not copied until torch counts a write.

    Integers and flags stay, because most of them are settings of the program. Buffers larger than
    all `parameters` together stay too: a copy would take longer than the step of the optimizer.

    Args:
        layers: the layers.
        parameters: the parameters that the optimizer trains.
    """

    def __init__(self, layers: Sequence[nn.Module], parameters: Iterable[Tensor]) -> None:
        self._layers = layers
        self._largest = _size_limit(parameters)
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self.save()

    def save(self) -> None:
        """Saves the current values, including non-finite values."""
        self._buffers.clear()
        self._steps = 0
        self.end(False)

    def keep_written(self) -> None:
        """Saves what the program has written since the last step."""
        if any(buffer.is_written() for buffer in self._buffers.values()):
            self.end(False)

    def on_step_ended(self, skipped: bool | Tensor) -> None:
        """Ends a judged step, see `StepListener.ended`."""
        self._steps += 1
        if self._steps == 2:
            for buffer, now in self._current():
                is_large = now.nbytes > SMALL_BYTES and not buffer.is_written()
                if is_large and torch.equal(buffer.saved, now.flatten()):
                    buffer.saved = None
        self.end(skipped)

    @torch.no_grad()
    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the values after a skip, otherwise saves the values. No sync.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        if isinstance(skipped, Tensor) and skipped.is_cpu:
            skipped = bool(skipped)
        kinds: dict[tuple[Any, ...], list[tuple[_Buffer, Tensor]]] = {}
        for buffer, now in self._current():
            saved = buffer.saved
            if saved is None and not buffer.is_written():
                continue  # constant
            if saved is None or (saved.device, saved.dtype) != (now.device, now.dtype):
                buffer.note(now.flatten().clone())  # there is nothing to restore
            elif saved.numel() != now.numel():
                # Its first forward pass has given it its shape. A sync, once for each such buffer.
                if bool(skipped):
                    buffer.table[buffer.name] = now = saved.view(buffer.shape)
                buffer.note(now.flatten().clone())
            else:
                alone: _Buffer | None = None
                if now.nbytes > SMALL_BYTES:
                    alone = buffer
                kind = now.device, now.dtype, buffer.name in STATISTICS, alone
                kinds.setdefault(kind, []).append((buffer, now))
        _keep_or_restore([_Block(found) for found in kinds.values()], skipped, len(self._layers))

    def _current(self) -> Iterator[tuple[_Buffer, Tensor]]:
        """Yields each buffer that can be restored, and its current value."""
        for number, layer in enumerate(self._layers):
            for name, now in layer._buffers.items():
                if (
                    _is_plain(now)
                    and (now.is_floating_point() or now.is_complex() or name == COUNT)
                    and now.dtype.itemsize > 1  # float8 cannot be compared
                    and now.nbytes <= self._largest
                ):
                    buffer = self._buffers.get((number, name))
                    if buffer is None:
                        buffer = _Buffer(number, layer._buffers, name)
                        self._buffers[number, name] = buffer
                    yield buffer, now


class _Block:
    """The values of buffers of one device and dtype, one buffer after the other.

    Attributes:
        buffers: the buffers.
        sizes: the number of values of each buffer.
        saved: the values after the last step.
        values: the current values, and later the values to keep.
        is_bad: which values are NaN, or Inf in statistics, and were not so after the last step; for
            a single buffer, which may be large, whether any value is.

    Args:
        found: each buffer and its current value.
    """

    def __init__(self, found: Sequence[tuple[_Buffer, Tensor]]) -> None:
        self.buffers = [buffer for buffer, _ in found]
        self.sizes = [now.numel() for _, now in found]
        self.values = torch.cat([now.flatten() for _, now in found])
        self.saved = torch.cat([buffer.saved for buffer in self.buffers])
        limit = math.inf
        if self.buffers[0].name in STATISTICS:
            limit = torch.finfo(torch.float32).max
        self.is_bad = (self.saved.abs() <= limit) & ~(self.values.abs() <= limit)
        if len(self.buffers) == 1:
            self.is_bad = self.is_bad.any().view(1)

    def layers(self) -> Tensor:
        """The number of the layer of each value of `is_bad`."""
        numbers = torch.tensor([[buffer.layer for buffer in self.buffers], self.sizes])
        layers, sizes = numbers.to(self.values.device, non_blocking=True)
        if len(self.buffers) == 1:
            return layers
        return layers.repeat_interleave(sizes, output_size=len(self.values))


def _keep_or_restore(blocks: Sequence[_Block], skipped: bool | Tensor, count: int) -> None:
    """Keeps what a step has written, or restores the values of before. No sync.

    Args:
        blocks: the buffers.
        skipped: see `LayerBuffers.end`.
        count: the number of layers.
    """
    is_healthy = skipped is False and all(b.values.is_cpu and not b.is_bad.any() for b in blocks)
    if not is_healthy:
        # For each layer, 0 if it is kept.
        restored = torch.as_tensor(skipped, dtype=torch.float32).expand(count).clone()
        for block in blocks:
            restored = gradients.to_device(restored, block.values.device)
            restored.index_add_(0, block.layers(), block.is_bad.float())
        for block in blocks:
            restored = gradients.to_device(restored, block.values.device)
            is_restored = restored[block.layers()] > 0
            block.values = torch.where(is_restored, block.saved, block.values)
    for block in blocks:
        values = block.values.split(block.sizes)
        if not is_healthy:
            # A tensor that the program has put there is not written: it may be the batch. A write
            # to .data counts as no write for autograd, like that of a layer's own kernel.
            targets = [buffer.tensor.data for buffer in block.buffers]
            sources = [v.view_as(target) for v, target in zip(values, targets, strict=True)]
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        for buffer, value in zip(block.buffers, values, strict=True):
            if buffer.table[buffer.name] is not buffer.tensor and not is_healthy:
                buffer.table[buffer.name] = buffer.tensor
            buffer.note(value)


def _is_plain(value: Tensor | None) -> TypeGuard[Tensor]:
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
        Optimizer name -> the buffers of the layers that the optimizer trains, if there are any. An
        optimizer in observe mode, which changes nothing, is not in the result.
    """
    owners: dict[int, str] = {}  # id of a parameter -> name of its optimizer
    for name, healing in healings.items():
        if healing.engine.mode != "observe":
            owners.update((id(p), name) for p in gradients.parameters(healing.optimizer))
    layers: dict[str, list[nn.Module]] = {}
    seen: set[int] = set()

    def add(module: nn.Module, owner: str | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        owner = next((owners[id(p)] for p in module.parameters() if id(p) in owners), owner)
        if owner is not None and len(module._buffers) > 0:
            layers.setdefault(owner, []).append(module)
        for child in module.children():
            add(child, owner)

    for value in state.values():
        if isinstance(value, nn.Module):
            add(value, None)
    found: dict[str, LayerBuffers] = {}
    for name, own in layers.items():
        found[name] = LayerBuffers(own, gradients.parameters(healings[name].optimizer))
    return found


class UnsavedBuffers:
    """The written buffers of a state that are not in `state_dict()`. A checkpoint saves them.

    torch leaves out buffers with `persistent=False`. Most of them are constants of the program, for
    example the frequencies of rotary embeddings, which the next start may define anew. So a buffer
    is saved if its value differs from the value at the start, and `load` restores the value at the
    start if a checkpoint lacks the buffer. With several ranks all buffers are saved, because a
    checkpoint has the same arrays on each rank.

    A buffer larger than all parameters together is never saved. A program that keeps such a cache
    or data set out of `state_dict()` does not want it in each checkpoint.

    Args:
        state: the state of the run.
        saves_all: returns whether all buffers are saved, as with several ranks.
        warn: reports a line to the user.
    """

    optional = True
    """Checkpoints of earlier versions lack this item, and can be restored."""

    def __init__(
        self, state: State, saves_all: Callable[[], bool], warn: Callable[[str], object]
    ) -> None:
        self._state = state
        self._saves_all = saves_all
        self._warn = warn
        self._first: dict[str, Tensor | None] = {}
        """Path -> value at the start, on the host."""
        self._named: set[str] = set()
        """Paths of the large buffers that a line has named."""
        for path, value in self._values():
            if value is None:
                self._first[path] = None
            elif type(value) is Tensor:
                self._first[path] = value.detach().to("cpu", copy=True)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor | None]:
        """The buffers to save, not copied.

        Returns:
            Path, such as "model.layers.0.center" -> value, or None where the module has None.
        """
        saves_all = self._saves_all()
        found: dict[str, Tensor | None] = {}
        for path, value in self._values():
            if saves_all or not self._is_first(path, value):
                found[path] = value
        return found

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor | None]) -> None:
        """Restores the values of a checkpoint.

        Args:
            saved: what `state_dict` has returned. A buffer that it lacks gets its first value.
        """
        modules = dict(self._modules())
        for path, value in [*self._values()]:
            if path not in saved and path in self._first and not self._is_first(path, value):
                _put(modules, path, self._first[path])
        for path, value in saved.items():
            _put(modules, path, value)

    def _is_first(self, path: str, value: Tensor | None) -> bool:
        """Whether a buffer has its value of the start. A sync on an accelerator."""
        first = self._first.get(path)
        if value is None or first is None:
            return value is first and path in self._first
        return torch.equal(value.cpu(), first)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields path and module."""
        for item, root in self._state.items():
            if isinstance(root, nn.Module):
                yield from root.named_modules(prefix=item)

    def _values(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yields path and value of each buffer to save that `state_dict()` leaves out."""
        modules = dict(self._modules())
        largest = _size_limit(p for each in modules.values() for p in each._parameters.values())
        for place, module in modules.items():
            for name, value in module._buffers.items():
                path = f"{place}.{name}"
                is_plain = _is_plain(value)
                is_savable = value is None or is_plain or gradients.is_dtensor(value)
                if name not in module._non_persistent_buffers_set or not is_savable:
                    continue
                if not is_plain or value.nbytes <= largest:
                    yield path, value
                elif path not in self._named:
                    self._named.add(path)
                    self._warn(
                        f"checkpoints do not hold {path}, which is not in state_dict() and is "
                        "larger than all parameters together: write register_buffer(..., "
                        "persistent=True) if the training writes it"
                    )


def _put(modules: Mapping[str, nn.Module], path: str, value: Tensor | None) -> None:
    """Replaces the value of a buffer, in the memory of the current tensor if the value fits.

    Registers the buffer if the forward pass of the saved run has done so.

    Args:
        modules: path -> module.
        path: path of the buffer. Nothing is done if the module is gone.
        value: the new value.
    """
    place, _, name = path.rpartition(".")
    module = modules.get(place)
    if module is None:
        return
    now = module._buffers.get(name)
    if value is not None:
        if now is not None and now.shape == value.shape and now.dtype == value.dtype:
            with suppress(RuntimeError):  # the elements of an expanded tensor share memory
                now.copy_(value)
                return
        device = value.device
        for tensor in (*module.parameters(), now):
            if tensor is not None:
                device = tensor.device
        value = value.to(device, copy=True)
    if name in module._buffers:
        module._buffers[name] = value
    elif not hasattr(module, name):
        module.register_buffer(name, value, persistent=False)
