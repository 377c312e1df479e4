"""Restores buffers other than batch statistics after a skipped step, if a forward pass writes them.

Observers of quantization-aware training, moving averages, codebooks and memory banks keep what a
forward pass has seen. A batch with NaN stays in them, and every later step is NaN too.

Most buffers never change, for example tables of positions. Copying them at each step would waste
time, so only the buffers that a forward pass writes are copied. torch counts the writes to a tensor
(`Tensor._version`). torch does not count a write to `buffer.data`, and a CUDA graph counts nothing.
The buffers with such writes are found by their content, once, over the first steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.torch import gradients
from healcore.torch.engines import AsyncCopy

MAX_EAGER_BYTES = 1 << 18
"""Size in bytes up to which a buffer is copied before a forward pass has ever written it."""
MAX_SHARED_BYTES = 1 << 16
"""Size in bytes above which a buffer is copied by itself, and not together with others."""
STEPS_TO_READ = 12
"""Step at which a comparison of contents is read. It has arrived from an accelerator by then."""


class _Buffer:
    """One buffer of a module, and its value before the forward pass.

    Attributes:
        table: the buffers of the module itself, `module._buffers`.
        name: the buffer's key in `table`.
        tensor: the buffer at the last `note`.
        shape: shape of `tensor` at the last `note`.
        version: number of writes to `tensor` at the last `note`.
        saved: the flat value before the forward pass, or None if it is unknown.
    """

    __slots__ = ("name", "saved", "shape", "table", "tensor", "version")

    def __init__(self, table: dict[str, Tensor | None], name: str, tensor: Tensor) -> None:
        self.table = table
        self.name = name
        self.note(tensor, None)

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the buffer also after its tensor was replaced."""
        return id(self.table), self.name

    def note(self, tensor: Tensor, saved: Tensor | None) -> None:
        """Notes the current tensor and its value. A write after this call counts as a change."""
        self.tensor = tensor
        self.shape = tensor.shape
        self.version = tensor._version
        self.saved = saved

    def replace(self, value: Tensor) -> None:
        """Replaces the buffer by the flat `value`, in the shape of the last `note`.

        The current tensor is not written: it may share memory with something else, as the batch.
        """
        now = value.clone().view(self.shape)
        self.table[self.name] = now
        self.note(now, value)


class WrittenBuffers:
    """The floating buffers that the forward passes of some modules write.

    A skipped step restores these buffers to their values before the step. Integers and flags stay,
    because most of them are settings of the program. Buffers larger than all `parameters` together
    stay too: to copy such a buffer would take longer than the step of the optimizer.

    How a write to a buffer is noticed:

        buffer.add_(x), module.buffer = x    torch counts the write, or another tensor is there
        buffer.data.add_(x), a CUDA graph    by content: `compare_contents` has found such buffers

    Args:
        modules: the modules.
        without: names of buffers that are not watched.
        parameters: the parameters that the optimizer of the modules trains.
    """

    def __init__(
        self, modules: Iterable[nn.Module], without: Collection[str], parameters: Iterable[Tensor]
    ) -> None:
        self._modules = [*modules]
        self._without = without
        self._largest = max(MAX_EAGER_BYTES, sum(p.nbytes for p in parameters if not is_lazy(p)))
        self._counted: list[_Buffer] = []
        """The buffers whose writes torch counts."""
        self._uncounted: list[_Buffer] = []
        """The buffers that are written without a new version."""
        self._ended = 0
        """Steps ended, until the contents are compared."""
        self._sums: list[tuple[list[_Buffer], list[tuple[int, int]], AsyncCopy]] = []
        """Buffers, the identities and versions of their tensors, and the sums over their bits."""
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        """Saves the current values, and finds new buffers.

        Large buffers that no forward pass has ever written are not copied, but watched.
        """
        known = {buffer.key: buffer for buffer in self._buffers}
        uncounted = {buffer.key for buffer in self._uncounted}
        self._counted = []
        self._uncounted = []
        for table, name, now in self._found():
            buffer = known.get((id(table), name))
            if buffer is None:
                buffer = _Buffer(table, name, now)
            value: Tensor | None = None
            if now.nbytes <= MAX_EAGER_BYTES or buffer.saved is not None:
                value = now.clone().reshape(-1)
            buffer.note(now, value)
            if buffer.key in uncounted:
                self._uncounted.append(buffer)
            else:
                self._counted.append(buffer)

    @property
    def _buffers(self) -> list[_Buffer]:
        return self._counted + self._uncounted

    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the written buffers if it was skipped, else saves them.

        NaN is always restored, because a loop may skip a batch with NaN without a step.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        changed = self._changed()
        if skipped is not False:
            # Uncounted writes of a step that was not skipped are saved by `keep`: once per step.
            changed += self._uncounted
        if changed:
            self._end(changed, skipped)

    def keep(self) -> None:
        """Saves what was written since the last step. Called between two steps."""
        changed = self._changed() + self._uncounted
        if changed:
            self._end(changed, False)

    def _changed(self) -> list[_Buffer]:
        """The buffers that were written or replaced since the last call of `note`."""
        changed: list[_Buffer] = []
        for buffer in self._counted:
            now = buffer.table.get(buffer.name)
            if now is None or now is not buffer.tensor or now._version != buffer.version:
                changed.append(buffer)
        return changed

    @torch.no_grad()
    def _end(self, changed: Iterable[_Buffer], skipped: bool | Tensor) -> None:
        """Ends a step for these buffers, together for each device and dtype."""
        kinds: dict[object, list[_Buffer]] = {}
        for buffer in changed:
            now = buffer.table.get(buffer.name)
            if not self._is_followed(now):
                for buffers in (self._counted, self._uncounted):
                    if buffer in buffers:
                        buffers.remove(buffer)
            elif buffer.saved is not None and buffer.saved.numel() == now.numel():
                alone: int | None = None
                if now.nbytes > MAX_SHARED_BYTES:
                    alone = id(buffer)
                kinds.setdefault((now.device, now.dtype, alone), []).append(buffer)
            elif buffer.saved is not None and bool(skipped):
                # Its first forward pass has given it its shape. A sync, once for each such buffer.
                buffer.replace(buffer.saved)
            else:
                buffer.note(now, now.clone().reshape(-1))
        for buffers in kinds.values():
            _end(buffers, skipped)

    def compare_contents(self) -> None:
        """Finds the buffers that are written without a new version. Called after each step.

        Compares the contents after the first two steps, once, without a sync:

            step 1, step 2     sums over the bits of each buffer, copied to the host
            step 12            compares the sums; on a CPU already at step 2
        """
        if self._ended > STEPS_TO_READ or not self._buffers:
            return
        self._ended += 1
        if self._ended == 1:
            self.save()  # with the buffers that the first forward pass has made
        if self._ended <= 2:
            devices: dict[torch.device, list[_Buffer]] = {}
            for buffer in self._buffers:
                devices.setdefault(buffer.tensor.device, []).append(buffer)
            for buffers in devices.values():
                writes = [(id(buffer.tensor), buffer.version) for buffer in buffers]
                self._sums.append((buffers, writes, _sums(buffers)))
        step_to_read = STEPS_TO_READ
        if all(buffer.tensor.is_cpu for buffer in self._buffers):
            step_to_read = 2
        if self._ended == step_to_read:
            self._read_sums()
            self._sums = []
            self._ended = STEPS_TO_READ + 1

    def _read_sums(self) -> None:
        """Moves buffers with other content, but without a counted write, to `_uncounted`."""
        first: dict[int, tuple[tuple[int, int], int]] = {}
        for buffers, writes, sums in self._sums:
            for buffer, write, value in zip(buffers, writes, sums.read().tolist(), strict=True):
                first_write, first_value = first.setdefault(id(buffer), (write, value))
                was_written = first_value != value
                was_counted = first_write != write
                if was_written and not was_counted and buffer in self._counted:
                    self._counted.remove(buffer)
                    self._uncounted.append(buffer)

    def _found(self) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
        """Yields the table, the name and the value of each buffer that is followed."""
        seen: set[int] = set()
        for module in self._modules:
            for name, now in module._buffers.items():
                if name not in self._without and id(now) not in seen and self._is_followed(now):
                    seen.add(id(now))
                    yield module._buffers, name, now

    def _is_followed(self, now: Tensor | None) -> TypeGuard[Tensor]:
        """Whether a buffer is of a kind that can be restored."""
        return (
            type(now) is Tensor
            and (now.is_floating_point() or now.is_complex())
            and now.dtype.itemsize > 1  # float8 has no sum
            and now.layout is torch.strided
            and not (now.is_nested or now.is_meta or now.requires_grad or now.is_inference())
            and now.nbytes <= self._largest
        )


def _end(buffers: Sequence[_Buffer], skipped: bool | Tensor) -> None:
    """Ends a step for buffers of one device and dtype whose number of elements is as before."""
    tensors: list[Tensor] = []
    saved_parts: list[Tensor] = []
    for buffer in buffers:
        tensor = buffer.table[buffer.name]
        assert tensor is not None  # neither is None, see `WrittenBuffers._end`
        assert buffer.saved is not None
        tensors.append(tensor)
        saved_parts.append(buffer.saved)
    counts = [part.numel() for part in saved_parts]
    if len(tensors) == 1:
        now = tensors[0].reshape(-1)
    else:
        now = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if skipped is False and now.is_cpu and not now.sum().isnan():  # the sum may be complex
        # The step is kept, and without NaN: the usual case, in which nothing is restored.
        values: Sequence[Tensor]
        if len(tensors) == 1:
            values = [saved_parts[0].copy_(now)]  # `now` shares the buffer's memory
        else:
            values = now.split(counts)
        for buffer, tensor, value in zip(buffers, tensors, values, strict=True):
            buffer.note(tensor, value)
        return
    saved = torch.cat(saved_parts)
    if skipped is not True:
        restored = now.isnan()
        if isinstance(skipped, Tensor):
            restored |= gradients.to_device(skipped, now.device) > 0
        saved = torch.where(restored, saved, now)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for buffer, tensor, value in zip(buffers, tensors, saved.split(counts), strict=True):
        if tensor is buffer.tensor and tensor.shape == buffer.shape:
            # Like a layer's own kernel, a write to .data counts as no write for autograd.
            targets.append(tensor.data)
            sources.append(value.view(buffer.shape))
            buffer.note(tensor, value)
        else:
            buffer.replace(value)
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _sums(buffers: Sequence[_Buffer]) -> AsyncCopy:
    """A sum over the bits of each buffer, which a write changes."""
    sums: list[Tensor] = []
    for buffer in buffers:
        sums.append(bits_of(buffer.tensor).sum(dtype=torch.int64))
    return AsyncCopy(torch.stack(sums))


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor, uint8 (n,). They share its memory where that is possible."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # a view of each second element, for example
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
