"""The numbers of one judged step, on their way from the engine's state to `Told`.

In the host seat the state is immutable: a reference is enough. In the device seat it is written in
place, so a step's numbers are packed into one tensor and copied to pinned memory at once, behind
the engine and before the optimizer's kernels; by the time they are read they have long arrived.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from healcore.core.engine import EngineState
from healcore.core.verdict import Action, Cause, Decision
from healcore.torch.device_seat import DeviceSeat
from healcore.torch.errors import AttachError
from healcore.torch.host_seat import HostSeat


class Numbers(NamedTuple):
    """What `Told` says of a step, in Python values; the order is that of the packed tensor."""

    step: int
    action: int
    cause: int
    rollback_depth: int
    skip: int
    onset: int
    incident: int
    incident_open: int
    grad_scale: float
    lr_scale: float
    loss: float
    grad_norm: float
    threshold: float
    z: float
    z_loss: float

    @property
    def decision(self) -> Decision:
        """As ordered. Without `group_scale`, of which there may be thousands."""
        return Decision(
            grad_scale=self.grad_scale,
            skip=bool(self.skip),
            lr_scale=self.lr_scale,
            action=Action(self.action),
            cause=Cause(self.cause),
            rollback_depth=self.rollback_depth,
        )


_INTEGERS = Numbers._fields.index("grad_scale")


class Source(Protocol):
    """Numbers that can be read when they are wanted."""

    def read(self) -> Numbers:
        """Waits only if they have not arrived yet."""
        ...


def source(seat: HostSeat | DeviceSeat) -> Source:
    """The numbers of the step that a seat has just judged."""
    return OnHost(seat.state) if isinstance(seat, HostSeat) else OnDevice(seat.state)


class OnHost:
    """A state of the host seat: NumPy scalars."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def read(self) -> Numbers:
        """Nothing to wait for."""
        values = _ordered(self._state)
        integers = [int(value) for value in values[:_INTEGERS]]
        return Numbers(*integers, *(float(value) for value in values[_INTEGERS:]))


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
    """A state of the device seat: its numbers as int32 (n,), floats by their bits."""

    def __init__(self, state: EngineState) -> None:
        values = _ordered(state)
        packed = torch.stack(
            [value.to(torch.int32) for value in values[:_INTEGERS]]
            + [value.view(torch.int32) for value in values[_INTEGERS:]]
        )
        self._packed = InFlight(packed)

    def read(self) -> Numbers:
        """Waits for the copy."""
        values = self._packed.read()
        floats = values[_INTEGERS:].view(np.float32)
        return Numbers(*values[:_INTEGERS].tolist(), *floats.tolist())


def _ordered(state: EngineState) -> list[Any]:
    last, incident = state.last, state.incident
    ordered = last.decision
    return [
        state.step,
        ordered.action,
        ordered.cause,
        ordered.rollback_depth,
        ordered.skip,
        incident.onset,
        incident.number,
        incident.open,
        ordered.grad_scale,
        ordered.lr_scale,
        last.loss,
        last.grad_norm,
        last.threshold,
        last.z,
        last.z_loss,
    ]


def _on_its_way(packed: Tensor) -> Tensor:
    """Pinned host memory that a CUDA tensor is being copied to."""
    if torch.cuda.is_current_stream_capturing():
        raise AttachError(
            "optimizer.step() is being captured in a CUDA graph, whose replays run no hooks: the "
            "Healer would not see them; call step() outside of the graph, or use attach() alone"
        )
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    return host.copy_(packed, non_blocking=True)
