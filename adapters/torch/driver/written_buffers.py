"""Restores buffers other than batch statistics after a skipped step, if a forward pass writes them.

Observers of quantization-aware training, moving averages, codebooks and memory banks keep what a
forward pass has seen. A batch with NaN stays in them, and every later step is NaN too.

Most buffers never change, for example tables of positions. Copying them at each step would waste
time, so only the buffers that a forward pass writes are copied. torch counts the writes to a tensor
(`Tensor._version`). torch does not count a write to `buffer.data`, and a CUDA graph counts nothing.
The buffers with such writes are found by their content, once, over the first steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.torch.driver.batch_statistics import BUFFER_NAMES, Block, keep_or_restore
from healcore.torch.live_engine import AsyncCopy

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
        parameters: the parameters that the optimizer of the modules trains.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
        self._modules = [*modules]
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
            if buffer.key in uncounted or name in BUFFER_NAMES:  # torch's kernel counts nothing
                self._uncounted.append(buffer)
            else:
                self._counted.append(buffer)

    @property
    def _buffers(self) -> list[_Buffer]:
        return self._counted + self._uncounted

    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores the written buffers if it was skipped, else saves them.

        A module with new NaN is always restored: all its buffers that the step has written, because
        the batch has spoilt the finite ones too. The step itself may be finite, or a loop may skip
        a batch with NaN without a step.

        Args:
            skipped: whether the step was skipped: a bool, or a 0-d float32 of 0 or 1 on the device.
        """
        self._end(self._changed() + self._uncounted, skipped)

    def keep(self) -> None:
        """Saves what was written since the last step. Called between two steps."""
        self.end(False)

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
            if not self._is_followed(now, buffer.name):
                for buffers in (self._counted, self._uncounted):
                    if buffer in buffers:
                        buffers.remove(buffer)
                continue
            saved = buffer.saved
            if saved is None or (saved.device, saved.dtype) != (now.device, now.dtype):
                buffer.note(now, now.clone().reshape(-1))  # there is nothing to restore
            elif saved.numel() == now.numel():
                alone: int | None = None
                if now.nbytes > MAX_SHARED_BYTES:
                    alone = id(buffer)
                kind = now.device, now.dtype, buffer.name in BUFFER_NAMES, alone
                kinds.setdefault(kind, []).append(buffer)
            elif bool(skipped):
                # Its first forward pass has given it its shape. A sync, once for each such buffer.
                buffer.replace(saved)
            else:
                buffer.note(now, now.clone().reshape(-1))
        _end([*kinds.values()], skipped)

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
                if id(now) not in seen and self._is_followed(now, name):
                    seen.add(id(now))
                    yield module._buffers, name, now

    def _is_followed(self, now: Tensor | None, name: str) -> TypeGuard[Tensor]:
        """Whether a buffer is of a kind that can be restored."""
        return (
            type(now) is Tensor
            and (now.is_floating_point() or now.is_complex() or name in BUFFER_NAMES)
            and now.dtype.itemsize > 1  # float8 has no sum
            and now.layout is torch.strided
            and not (now.is_nested or now.is_meta or now.requires_grad or now.is_inference())
            and now.nbytes <= self._largest
        )


def _end(kinds: Sequence[Sequence[_Buffer]], skipped: bool | Tensor) -> None:
    """Ends a step for buffers whose number of elements is as before.

    Args:
        kinds: lists of buffers of one device and dtype.
        skipped: see `WrittenBuffers.end`.
    """
    numbers: dict[int, int] = {}  # id of a module's buffers -> number of the module
    found: list[tuple[Sequence[_Buffer], list[Tensor], Block]] = []
    for buffers in kinds:
        modules: list[int] = []
        tensors: list[Tensor] = []
        saved: list[Tensor] = []
        for buffer in buffers:
            tensor = buffer.table[buffer.name]
            assert tensor is not None  # neither is None, see `WrittenBuffers._end`
            assert buffer.saved is not None
            modules.append(numbers.setdefault(id(buffer.table), len(numbers)))
            tensors.append(tensor)
            saved.append(buffer.saved)
        sizes = [tensor.numel() for tensor in tensors]
        block = Block(modules, sizes, _joined(saved), _joined(tensors))
        block.inf_is_bad = buffers[0].name in BUFFER_NAMES
        found.append((buffers, tensors, block))
    if skipped is False and all(block.is_sound() for _, _, block in found):
        # The step is kept, and nothing is spoilt: the usual case, in which nothing is restored.
        for buffers, tensors, block in found:
            block.saved.copy_(block.now)  # a single buffer shares the memory of `now`
            for buffer, tensor, value in zip(buffers, tensors, block.parts(), strict=True):
                buffer.note(tensor, value)
        return
    keep_or_restore([block for _, _, block in found], len(numbers), skipped)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for buffers, tensors, block in found:
        for buffer, tensor, value in zip(buffers, tensors, block.parts(), strict=True):
            if tensor is buffer.tensor and tensor.shape == buffer.shape:
                # Like a layer's own kernel, a write to .data counts as no write for autograd.
                targets.append(tensor.data)
                sources.append(value.view(buffer.shape))
                buffer.note(tensor, value)
            else:
                buffer.replace(value)
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The values of all tensors, 1-d. A single tensor may share its memory."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


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
