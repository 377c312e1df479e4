"""The `StepRecord` of a judged step, on its way from the engine's state to the host.

In the host seat the state is immutable: a reference is enough. In the device seat it is written in
place, so a step's record is packed into one tensor and copied to pinned memory at once, behind
the engine and before the optimizer's kernels; by the time they are read they have long arrived.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from healcore.core import step_record
from healcore.core.engine import EngineState
from healcore.core.step_record import StepRecord
from healcore.torch.device_seat import DeviceSeat
from healcore.torch.errors import AttachError
from healcore.torch.host_seat import HostSeat


class Source(Protocol):
    """A record that can be read when it is wanted."""

    def read(self) -> StepRecord:
        """Waits only if they have not arrived yet."""
        ...


def source(seat: HostSeat | DeviceSeat) -> Source:
    """The record of the step that a seat has just judged."""
    return OnHost(seat.state) if isinstance(seat, HostSeat) else OnDevice(seat.state)


class OnHost:
    """A state of the host seat: NumPy scalars."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def read(self) -> StepRecord:
        """Nothing to wait for."""
        return step_record.on_host(step_record.numbers(self._state))


class InFlight:
    """A tensor on its way to the host; only from CUDA before it is asked for.

    Args:
        tensor: the values; they may be overwritten once this is made.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            self._tensor = _on_its_way(tensor)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor

    def has_arrived(self) -> bool:
        """Whether reading it does not wait, as far as that can be known."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.cpu().numpy()


class OnDevice:
    """A state of the device seat, packed as `step_record.unpack` reads it."""

    def __init__(self, state: EngineState) -> None:
        values = step_record.numbers(state)
        packed = torch.stack(
            [value.to(torch.int32) for value in values[: step_record.INTS]]
            + [value.view(torch.int32) for value in values[step_record.INTS :]]
        )
        self._packed = InFlight(packed)

    def read(self) -> StepRecord:
        """Waits for the copy."""
        return step_record.unpack(self._packed.read())


def _on_its_way(packed: Tensor) -> Tensor:
    """Pinned host memory that a CUDA tensor is being copied to."""
    if torch.cuda.is_current_stream_capturing():
        raise AttachError(
            "optimizer.step() is being captured in a CUDA graph, whose replays run no hooks: the "
            "Healer would not see them; call step() outside of the graph, or use attach() alone"
        )
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    return host.copy_(packed, non_blocking=True)
