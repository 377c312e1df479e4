"""A simulated accelerator, for what code does between host and device; it needs no hardware.

Its tensors hold real values in host memory, autograd and fused optimizers work, and as on CUDA an
operation on tensors of host and device fails. It records where the host would wait. It is no
CUDA: there are no streams, no pinned memory, no compiler and no graphs, and nothing takes time.

Importing it registers torch's backend for other devices, once per process. So only programs of
their own import it (`tests/torch/simulated_runs.py`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,  # pyright: ignore[reportPrivateUsage]
)

waits: list[str] = []
"""The function of healcore that each wait of the host was in; `user` for code of the loop."""
uploads: list[str] = []
"""The same, for copies from the host that it does not wait for, which no CUDA graph can capture."""

aten = torch.ops.aten
_READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
}
_COPIES = {aten.copy_.default, aten._to_copy.default}


class Stream:
    """A stream in which everything has happened already."""

    def wait_stream(self, other: Stream | None = None) -> None:
        """Nothing to wait for."""

    synchronize = wait_stream


class _Backend:
    """What torch asks the module of a device."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Any:
        return contextlib.nullcontext()

    def empty_cache(self) -> None:
        pass


_setup_privateuseone_for_python_backend("simulated", backend_module=_Backend())
DEVICE = torch.device("simulated:0")


class DeviceTensor(Tensor):
    """A tensor on `DEVICE`; `held` are its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        """A tensor of the same layout; `held` is not copied."""
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    # What torch answers for plain tensors below the dispatcher.

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, new: DeviceTensor) -> None:
        self.held = new.held

    def tolist(self) -> Any:
        waits.append(_caller())
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def to_local(self) -> Tensor:
        """Itself, so that a checkpoint holds a plain tensor: the class is no part of the state."""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on what the tensors hold."""
        kwargs = dict(kwargs or {})
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_host = [each for each in given if not isinstance(each, cls)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        blocks = True
        if func in _COPIES:
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if on_host or (target is not None and target.type == "cpu"):
                (waits if blocks else uploads).append(_caller())
        elif any(each.ndim for each in on_host):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        elif func in _READS:
            waits.append(_caller())
        if target is not None and target.type == DEVICE.type:
            kwargs["device"] = torch.device("cpu")
        known = {id(each.held): each for each in given if isinstance(each, cls)}
        inner, options = tree_map_only(cls, lambda each: each.held, (args, kwargs))
        out = func(*inner, **options)
        if target is not None and target.type != DEVICE.type:
            if not blocks and out.is_floating_point():
                return torch.full_like(out, math.nan)  # has not arrived
            return out.clone() if id(out) in known else out

        def placed(each: Tensor) -> Tensor:
            if any(each is other for other in on_host):
                return each
            return known[id(each)] if id(each) in known else cls(each)

        return tree_map_only(Tensor, placed, out)


def _caller() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("healcore."):
            return f"{module}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "user"


def _empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return DeviceTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, to: DeviceTensor, non_blocking: bool = False) -> Tensor:
    """Of `torch.tensor(number, device=...)`."""
    waits.append(_caller())
    to.held.copy_(source)
    return to


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
