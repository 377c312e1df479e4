"""The `StepRecord` of a judged step, before it is read on the host.

The host engine's state is immutable: a reference is enough. The device engine writes its state in
place, so the record is packed into one tensor and its copy to pinned memory begins at once, after
the engine and before the optimizer's kernels; by the time it is read the copy has long finished.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from healcore.core import step_record
from healcore.core.engine import EngineState
from healcore.core.step_record import StepRecord
from healcore.torch.device_engine import LiveEngine
from healcore.torch.errors import AttachError
from healcore.torch.host_engine import HostEngine


class PendingRecord(Protocol):
    """A record that is read when it is needed."""

    def read(self) -> StepRecord:
        """The record; waits for the copy if it has not finished."""
        ...


def pending_record(live_engine: LiveEngine) -> PendingRecord:
    """The record of the step that an engine has just judged."""
    if isinstance(live_engine, HostEngine):
        return HostRecord(live_engine.state)
    return DeviceRecord(live_engine.state)


class HostRecord:
    """The record in a state of the host engine, NumPy scalars."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def read(self) -> StepRecord:
        """The record; never waits."""
        return step_record.on_host(step_record.numbers(self._state))


class AsyncCopy:
    """A tensor that is being copied to the host. Tensors not on CUDA are copied when read.

    Args:
        tensor: the values; on CUDA they may be overwritten as soon as this is made.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            self._tensor = _copied_to_pinned(tensor)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor

    def has_arrived(self) -> bool:
        """Whether reading it does not wait, as far as that can be known."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """The values; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.cpu().numpy()


class DeviceRecord:
    """The record in a state of the device engine, packed as `step_record.unpack` reads it."""

    def __init__(self, state: EngineState) -> None:
        values = step_record.numbers(state)
        packed = torch.stack(
            [value.to(torch.int32) for value in values[: step_record.INTS]]
            + [value.view(torch.int32) for value in values[step_record.INTS :]]
        )
        self._packed = AsyncCopy(packed)

    def read(self) -> StepRecord:
        """The record; waits for the copy."""
        return step_record.unpack(self._packed.read())


def _copied_to_pinned(packed: Tensor) -> Tensor:
    """Pinned host memory that a CUDA tensor is being copied to."""
    if torch.cuda.is_current_stream_capturing():
        raise AttachError(
            "optimizer.step() is being captured in a CUDA graph, whose replays run no hooks: the "
            "Healer would not see them; call step() outside of the graph, or use attach() alone"
        )
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    return host.copy_(packed, non_blocking=True)
