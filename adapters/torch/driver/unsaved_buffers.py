"""`UnsavedBuffers`: the buffers that are not in `state_dict()`, as an item of a checkpoint.

torch leaves buffers with `persistent=False` out of `state_dict()`. Most of them are constants, for
example the frequencies of rotary embeddings. Some are moving averages that the forward pass writes:
without them a restart would begin with their first values, and a rollback would leave the values of
the undone steps.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.torch.driver.written_buffers import MAX_EAGER_BYTES, bits_of
from healcore.torch.live_state import State


class _Buffer:
    """One buffer that is not in the `state_dict()` of its module.

    Attributes:
        table: the buffers of the module, `module._buffers`.
        name: the buffer's key in `table`.
        is_new: whether the buffer was registered after the start, so that `first` is unknown.
        first: a copy on the host of the value at the start. None if there was no tensor, or a
            tensor that is not copied.
        noted: refers to the tensor at the start, or after `UnsavedBuffers.load`; None without one.
            It does not keep the tensor alive, which may be a data set on the device.
        device: the device of that tensor, or None.
        version: number of writes to that tensor at that time.
        is_written: whether a write was noticed. Then each later checkpoint holds the buffer.
        is_uncounted: whether torch does not count its writes (to its `data`, or by a CUDA graph).
    """

    def __init__(self, table: dict[str, Tensor | None], name: str, *, is_new: bool) -> None:
        self.table = table
        self.name = name
        self.is_new = is_new
        self.is_written = is_new
        self.is_uncounted = False
        self.first: Tensor | None = None
        self.note()

    @property
    def now(self) -> Tensor | None:
        """The current value."""
        return self.table.get(self.name)

    def note(self) -> None:
        """Notes the current tensor. A write after this call counts as a change."""
        now = self.now
        self.noted: weakref.ref[Tensor] | None = None
        self.device: torch.device | None = None
        if now is not None:
            self.noted = weakref.ref(now)
            self.device = now.device
        self.version = _writes(now)

    def has_counted_write(self) -> bool:
        """Whether the tensor was replaced, or torch has counted a write."""
        now = self.now
        if self.noted is None or now is None:
            return self.noted is not None or now is not None
        return now is not self.noted() or _writes(now) != self.version

    def has_other_content(self) -> bool:
        """Whether the content differs from the first content. A sync on an accelerator."""
        now = self.now
        if now is None or self.first is None:
            return False
        return not torch.equal(bits_of(now.cpu()), bits_of(self.first))

    def put(self, value: Tensor | None) -> None:
        """Replaces the value, in the memory of the current tensor if the value fits."""
        now = self.now
        if value is None or now is None:
            if value is not None and self.device is not None:
                value = value.to(self.device)
            if value is not None:
                value = value.clone()
            self.table[self.name] = value
        elif _can_be_written(now) and now.shape == value.shape and now.dtype == value.dtype:
            now.copy_(value)
        else:
            self.table[self.name] = value.to(now.device, copy=True)


class UnsavedBuffers:
    """The written buffers of a state that are not in `state_dict()`. A checkpoint saves them.

    A constant buffer is not saved: a buffer counts as written after its first write. A checkpoint
    of an earlier time lacks the buffer then, and `load` restores the first value, which this object
    keeps on the host. With several ranks the structure alone decides, because a checkpoint has the
    same arrays on each rank: all buffers are saved.

    A buffer larger than all parameters together is never saved. A program that keeps such a cache
    or data set out of `state_dict()` does not want it in each checkpoint.

    How a write is noticed, at a save:

        buffer.add_(x), module.buffer = x    torch counts the write, or another tensor is there
        buffer.data.add_(x), a CUDA graph    by content: on a CPU at each save, on an accelerator
                                             once, at the first save after a step

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
        self._modules: dict[str, nn.Module] = {}
        """Path -> each module of the state, as of the last `_find`."""
        self._buffers: dict[str, _Buffer] = {}
        """Path -> each buffer that is not in `state_dict()`, as of the last `_find`."""
        self._named: set[str] = set()
        """Paths of the large buffers that a warning has named."""
        self.has_stepped = False
        """Whether an optimizer has stepped. The driver sets it."""
        self._has_compared = False
        """Whether the contents on accelerators were compared."""
        self._find(is_new=False)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor | None]:
        """The buffers to save, not copied.

        Returns:
            Path, such as "model.layers.0.center" -> value, or None where the module has None.
        """
        self._find()
        largest = self._largest()
        compares = self.has_stepped and not self._has_compared
        self._has_compared = self._has_compared or compares
        found: dict[str, Tensor | None] = {}
        for path, buffer in self._buffers.items():
            now = buffer.now
            if not _is_plain(now):
                continue
            is_written = self._is_written(buffer, compares=compares)
            if now is not None and now.nbytes > largest:
                if is_written and path not in self._named:
                    self._named.add(path)
                    self._warn(
                        f"{path} is written in training and is not in state_dict(), and is larger "
                        "than all parameters together: checkpoints do not hold it, and a restart "
                        "begins with its first value; write register_buffer(..., persistent=True) "
                        "if the training needs it"
                    )
            elif is_written or self._saves_all() or hasattr(now, "to_local"):
                found[path] = now
        return found

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor | None]) -> None:
        """Restores the values of a checkpoint.

        Args:
            saved: what `state_dict` has returned. A buffer that it lacks gets its first value.
        """
        self._find()
        for path, value in saved.items():
            buffer = self._buffers.get(path)
            if buffer is None:
                self._register(path, value)
            elif _is_plain(buffer.now):
                buffer.put(value)
                buffer.is_written = True
        for path, buffer in self._buffers.items():
            if path in saved or buffer.is_new or not _is_plain(buffer.now):
                continue
            if buffer.first is None and buffer.device is not None:
                continue  # too large for a copy
            if self._is_written(buffer, compares=False):
                buffer.put(buffer.first)
                buffer.note()
                buffer.is_written = buffer.is_uncounted

    def _is_written(self, buffer: _Buffer, *, compares: bool) -> bool:
        """Whether a buffer was written since the start.

        Args:
            buffer: the buffer.
            compares: whether contents on an accelerator are compared too.
        """
        if not buffer.is_written:
            buffer.is_written = buffer.has_counted_write()
        if not buffer.is_written and buffer.now is not None and (compares or buffer.now.is_cpu):
            buffer.is_uncounted = buffer.has_other_content()
            buffer.is_written = buffer.is_uncounted
        return buffer.is_written

    @torch.no_grad()
    def _find(self, *, is_new: bool = True) -> None:
        """Finds the buffers of the current structure, and copies the values of the first call."""
        known = self._buffers
        self._buffers = {}
        self._modules = {}
        largest = self._largest() if not is_new else 0
        for path, module, name in self._unsaved_names():
            buffer = known.get(path)
            if buffer is None or buffer.table is not module._buffers:
                buffer = _Buffer(module._buffers, name, is_new=is_new)
                now = buffer.now
                # A DTensor is in each checkpoint, so its first value is not needed.
                is_copied = _is_plain(now) and not hasattr(now, "to_local")
                if not is_new and is_copied and now is not None and now.nbytes <= largest:
                    buffer.first = now.detach().to("cpu", copy=True)
            self._buffers[path] = buffer

    def _unsaved_names(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yields path, module and name of each buffer that is not in `state_dict()`."""
        seen: set[int] = set()
        for item, root in self._state.items():
            if not isinstance(root, nn.Module):
                continue
            for place, module in root.named_modules():
                path = item
                if place:
                    path = f"{item}.{place}"
                self._modules[path] = module
                if id(module) in seen or not isinstance(module._buffers, dict):
                    continue  # a scripted module has no dictionary
                seen.add(id(module))
                for name in module._buffers:
                    if name in module._non_persistent_buffers_set:
                        yield f"{path}.{name}", module, name

    def _largest(self) -> int:
        """The size in bytes of the largest buffer that is saved."""
        size = 0
        for root in self._state.values():
            if isinstance(root, nn.Module):
                size += sum(p.nbytes for p in root.parameters() if not is_lazy(p))
        return max(MAX_EAGER_BYTES, size)

    def _register(self, path: str, value: Tensor | None) -> None:
        """Registers a buffer that the forward pass of the saved run has registered."""
        parent, _, name = path.rpartition(".")
        module = self._modules.get(parent)
        if module is None:
            return
        tables = (module._buffers, module._parameters, module._modules)
        attribute = inspect.getattr_static(module, name, None)
        if attribute is not None or any(name in table for table in tables):
            return
        if value is not None:
            device = value.device
            for p in module.parameters():
                device = p.device
                break
            value = value.to(device, copy=True)
        module.register_buffer(name, value, persistent=False)


def _writes(tensor: Tensor | None) -> int:
    """Number of counted writes to a tensor. torch counts none to a tensor of inference mode."""
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version


def _is_plain(value: Tensor | None) -> bool:
    """Whether a checkpoint can hold the value of a buffer: a dense tensor with data, or None."""
    if value is None:
        return True
    if type(value) is not Tensor and not hasattr(value, "to_local"):
        return False
    if is_lazy(value) or value.is_meta or value.is_quantized:
        return False
    return value.layout is torch.strided


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a tensor can be overwritten in place: each element has memory of its own."""
    if tensor.is_inference() or not tensor.is_leaf:
        return False
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            return False
    return True
