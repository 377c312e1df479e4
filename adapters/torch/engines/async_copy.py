"""`AsyncCopy`: brings the record of a step from a device to the host without waiting for it."""

from __future__ import annotations

import atexit
import ctypes
import gc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.core.errors import AttachError


class AsyncCopy:
    """An asynchronous copy of a CUDA tensor to the host; the tensor may be overwritten at once.

    The copy goes to pinned memory on the current stream, and an event marks its end. On other
    devices `read` reads the tensor itself.

    Args:
        tensor: the tensor to copy, on any device.

    Raises:
        AttachError: a CUDA graph is being captured.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event: Any = None
        if not tensor.is_cuda:
            return
        if torch.cuda.is_current_stream_capturing():
            raise AttachError(
                "optimizer.step() is being captured in a CUDA graph, whose replays healcore would "
                "not judge: call step() outside of the graph"
            )
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether `read` would return without waiting.

        Does not wait. True for a copy without an event, whose arrival is unknown.
        """
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """The values on the host. Waits for the copy if it has not arrived.

        Returns:
            The values as an array of NumPy, in the shape and dtype of the tensor.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.cpu().numpy()


@atexit.register
def keep_after_cuda_error() -> None:
    """Keeps all tensors until the process ends if CUDA has failed, as by a device-side assert.

    The driver calls it first when a run ends, and Python calls it at exit.

    torch would abort the process where it frees pinned memory: no traceback, no postmortem. Until
    this call, variables in the frames of the traceback keep the memory; unnamed values do not.
    """
    try:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().query()  # raises after a failure
    except RuntimeError:
        for candidate in gc.get_objects():
            # Not isinstance: that reads `__class__`, which an object may compute.
            if issubclass(type(candidate), Tensor):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(candidate))
