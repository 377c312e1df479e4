"""Restores buffers that the forward pass of a skipped step has written.

Observers of quantization-aware training, moving averages, codebooks and memory banks keep what a
forward pass has seen. A batch with NaN stays in them, and every later step is NaN too.

Most buffers never change, for example tables of positions. Copying them at each step would cost
time for nothing, so only what a forward pass writes is copied. torch counts the writes to a tensor
(`Tensor._version`). It does not count a write to `buffer.data`, and a CUDA graph counts nothing.
Such buffers are found by their content, once, over the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.torch import gradients
from healcore.torch.engines import AsyncCopy

SMALL = 1 << 18
"""Size in bytes up to which a buffer is copied before a forward pass has ever written it."""
LARGE = 1 << 16
"""Size in bytes above which a buffer is copied by itself, and not together with others."""
STEPS_TO_READ = 12
"""Step at which a comparison of contents is read. It has arrived from an accelerator by then."""


class _Buffer:
    """One buffer of a module, and its value before the forward pass.

    Attributes:
        saved: the flat value before the forward pass, or None if it is unknown.
    """

    __slots__ = ("name", "saved", "shape", "table", "tensor", "version")

    def __init__(self, table: dict[str, Tensor | None], name: str, tensor: Tensor) -> None:
        self.table, self.name = table, name
        self.note(tensor, None)

    def note(self, tensor: Tensor, saved: Tensor | None) -> None:
        """Notes the current tensor and its value."""
        self.tensor, self.shape, self.version = tensor, tensor.shape, tensor._version
        self.saved = saved

    def replace(self, value: Tensor) -> None:
        """Replaces the buffer by the flat `value`, in the shape of the last `note`.

        The current tensor is not written: it may share memory with something else, as the batch.
        """
        now = self.table[self.name] = value.clone().view(self.shape)
        self.note(now, value)


class WrittenBuffers:
    """The floating buffers of some modules which their forward passes write.

    A skipped step restores them to their values before it. Integers and flags stay, because most
    of them are settings of the program. Buffers larger than all `parameters` together stay too: to
    copy them would take longer than the step of the optimizer.

    Args:
        modules: the modules.
        without: names of buffers that are left out.
        parameters: the parameters that the optimizer of the modules trains.
    """

    def __init__(
        self, modules: Iterable[nn.Module], without: Collection[str], parameters: Iterable[Tensor]
    ) -> None:
        self._modules = [*modules]
        self._without = without
        self._largest = max(SMALL, sum(p.nbytes for p in parameters if not is_lazy(p)))
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
        """Saves the current values, and finds new buffers."""
        known = {(id(each.table), each.name): each for each in self._buffers}
        uncounted = [*map(id, self._uncounted)]
        self._counted, self._uncounted = [], []
        for table, name, now in self._found():
            buffer = known.get((id(table), name)) or _Buffer(table, name, now)
            is_copied = now.nbytes <= SMALL or buffer.saved is not None
            buffer.note(now, now.clone().reshape(-1) if is_copied else None)
            (self._uncounted if id(buffer) in uncounted else self._counted).append(buffer)

    @property
    def _buffers(self) -> list[_Buffer]:
        return self._counted + self._uncounted

    def end(self, skipped: bool | Tensor) -> None:
        """Ends a step: restores what was written if it was skipped, else saves what was written.

        NaN is always restored, because a loop may leave out a batch with NaN without a step.
        """
        # Uncounted writes of a step that was not skipped are saved by `keep` only: once per step.
        changed = self._changed()
        changed += self._uncounted if skipped is not False else []
        if changed:
            self._end(changed, skipped)

    def keep(self) -> None:
        """Saves what was written since the last step. Called between two steps."""
        changed = self._changed() + self._uncounted
        if changed:
            self._end(changed, False)

    def _changed(self) -> list[_Buffer]:
        """The buffers that were written or replaced since the last call of `note`."""
        return [
            each
            for each in self._counted
            if (now := each.table.get(each.name)) is not each.tensor or now._version != each.version  # pyright: ignore[reportOptionalMemberAccess]
        ]

    @torch.no_grad()
    def _end(self, changed: Iterable[_Buffer], skipped: bool | Tensor) -> None:
        kinds: dict[object, list[_Buffer]] = {}
        for buffer in changed:
            now = buffer.table.get(buffer.name)
            if not self._is_followed(now):
                self._counted = [each for each in self._counted if each is not buffer]
                self._uncounted = [each for each in self._uncounted if each is not buffer]
            elif buffer.saved is not None and buffer.saved.numel() == now.numel():
                alone = id(buffer) if now.nbytes > LARGE else None
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

        Compares the contents after the first two steps, once, without a sync.
        """
        if self._ended > STEPS_TO_READ or not self._buffers:
            return
        self._ended += 1
        if self._ended == 1:
            self.save()  # with the buffers that the first forward pass has made
        if self._ended <= 2:
            devices: dict[torch.device, list[_Buffer]] = {}
            for each in self._buffers:
                devices.setdefault(each.tensor.device, []).append(each)
            for buffers in devices.values():
                writes = [(id(each.tensor), each.version) for each in buffers]
                self._sums.append((buffers, writes, _sums(buffers)))
        on_host = all(each.tensor.is_cpu for each in self._buffers)
        if self._ended == (2 if on_host else STEPS_TO_READ):
            first: dict[int, tuple[Any, int]] = {}
            for buffers, writes, sums in self._sums:
                for buffer, write, value in zip(buffers, writes, sums.read().tolist(), strict=True):
                    earlier = first.setdefault(id(buffer), (write, value))
                    if earlier[0] == write and earlier[1] != value and buffer in self._counted:
                        self._counted.remove(buffer)
                        self._uncounted.append(buffer)
            self._sums, self._ended = [], STEPS_TO_READ + 1

    def _found(self) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
        """The table, the name and the value of each buffer that is followed."""
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
            and now.layout is torch.strided
            and not (now.is_meta or now.requires_grad or now.is_inference())
            and now.nbytes <= self._largest
        )


def _end(buffers: Sequence[_Buffer], skipped: bool | Tensor) -> None:
    """Ends a step for buffers of one device and dtype whose number of elements is as before."""
    found: list[Any] = [buffer.table[buffer.name] for buffer in buffers]
    known: list[Any] = [buffer.saved for buffer in buffers]
    counts = [each.numel() for each in known]
    flat = [each.reshape(-1) for each in found]
    now = flat[0] if len(flat) == 1 else torch.cat(flat)
    if skipped is False and now.is_cpu and not math.isnan(now.sum()):
        values = [known[0].copy_(now)] if len(flat) == 1 else now.split(counts)
        for buffer, tensor, value in zip(buffers, found, values, strict=True):
            buffer.note(tensor, value)
        return
    saved = torch.cat(known)
    if skipped is not True:
        restored = now.isnan()
        if isinstance(skipped, Tensor):
            restored |= gradients.moved(skipped, now.device) > 0
        saved = torch.where(restored, saved, now)
    written: list[tuple[Tensor, Tensor]] = []
    for buffer, tensor, value in zip(buffers, found, saved.split(counts), strict=True):
        if tensor is buffer.tensor and tensor.shape == buffer.shape:
            # Like a layer's own kernel, a write to .data counts as no write for autograd.
            written.append((tensor.data, value.view(buffer.shape)))
            buffer.note(tensor, value)
        else:
            buffer.replace(value)
    if written:
        torch._foreach_copy_(*map(list, zip(*written, strict=True)))  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]


def _sums(buffers: Sequence[_Buffer]) -> AsyncCopy:
    """A sum over the bits of each buffer, which a write changes."""
    bits = (each.tensor.detach().reshape(-1).view(torch.uint8) for each in buffers)
    weights = (each.sum(dtype=torch.int64) for each in bits)
    return AsyncCopy(torch.stack([*weights]))
