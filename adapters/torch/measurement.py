"""What the adapter measures in one step, and what it is then told to do: between hook and seat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from healcore.core.verdict import Decision
from healcore.torch import norms


class Measurement(NamedTuple):
    """One step, as tensors next to the parameters. Nothing of it has been read on the host."""

    grad_norm: Tensor | None
    """0-d float32: global norm of the gradients as they lie in `.grad`; None: there are none."""
    loss: Tensor | None = None
    """0-d float32: mean over the micro-batches of this step."""
    group_norms: Tensor | None = None
    """(n,) float32: norm of each parameter's gradient, 0 without one."""
    eval_loss: Tensor | None = None
    """0-d float32, NaN at a step without an evaluation."""
    update_norm: Tensor | None = None
    """0-d float32: norm of the previous update."""
    grad_divisor: Tensor | None = None
    """0-d float32: what the gradients are still multiplied by (a GradScaler's scale)."""
    found_inf: Tensor | None = None
    """0-d float32, above 0 when a GradScaler has found an overflow and skips this step."""
    void: Tensor | None = None
    """0-d bool: that overflow is the GradScaler's own business, learn and count nothing."""
    learning_rate: Tensor | None = None
    """0-d float32: the largest rate of any group, as the user's schedule has it."""
    rehearsal: bool = False
    """A fresh optimizer is stepped at learning rate 0, as torch.distributed.checkpoint does."""


class Judged(NamedTuple):
    """What else is known of a step that was judged; references only, nothing of it was read."""

    params: Sequence[Tensor]
    """The parameters with a gradient."""
    norms: Sequence[Tensor]
    """0-d float32 each: norm of its gradient, times `grad_divisor`."""
    grad_divisor: Tensor | None

    def on_host(self) -> np.ndarray:
        """The norms as (n,) float32, a GradScaler's scale taken out. A sync on an accelerator.

        Sharded norms are put together: every rank has to call it for the same steps.
        """
        stacked, divisor = read([norms.vector(self.norms, self.norms[0].device), self.grad_divisor])
        assert stacked is not None
        with np.errstate(all="ignore"):
            return stacked if divisor is None else stacked / divisor


class Order(NamedTuple):
    """What to enforce, as Python numbers. Neutral when the policy only observes."""

    skip: bool
    """Hold the step back: the policy's skip, or a GradScaler's."""
    grad_scale: float
    lr_scale: float
    group_scale: np.ndarray | None
    """(n,) float32 factors, or None."""


class DeviceOrder(NamedTuple):
    """The same as tensors, for optimizers that take it without the host."""

    found_inf: Tensor
    """0-d float32, exactly 0 or 1: 1 holds the step back."""
    grad_divisor: Tensor
    """0-d float32: the fused kernel divides the gradients by it."""
    lr_scale: Tensor
    """0-d float32."""
    grad_scale: Tensor
    """0-d float32 in [0, 1]."""
    group_scale: Tensor | None
    """(n,) float32, or None."""


class Seat(Protocol):
    """Where the engine sits: on the host in NumPy, or on the device in torch."""

    name: str

    @property
    def decision(self) -> Decision | None:
        """What was enforced at the last step, as arrays of the seat; None before the first."""
        ...

    def order(self, seen: Measurement) -> Order:
        """Judges one step and reads the answer: at most one sync."""
        ...

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        ...

    def decline(self) -> None:
        """Gives back the rollback that was ordered last."""
        ...

    def grow(self, groups: int) -> None:
        """Begins a history for parameters that were added after the others."""
        ...

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors, copies, without a sync."""
        ...

    def to_dict(self) -> dict:
        """The framework-neutral state; on a device this is a sync."""
        ...

    def load(self, data: dict, *, rollback: bool) -> None:
        """Takes over a saved state, whole or not at all."""
        ...


def read(tensors: list[Tensor | None]) -> list[Any]:
    """Brings float32 tensors to the host: no sync from a CPU, one for all from a device.

    Args:
        tensors: 0-d or 1-d float32, or None.

    Returns:
        NumPy scalars and arrays of the same shapes, copies; or None.
    """
    there = [t for t in tensors if t is not None]
    if all(t.device.type == "cpu" for t in there):
        # .numpy() shares memory and dispatches nothing (.item() would be a counted sync).
        return [None if t is None else _copied(t.numpy()) for t in tensors]
    return in_one_copy(tensors)


def _copied(array: np.ndarray) -> Any:
    return array.copy() if array.ndim else array[()]


def in_one_copy(tensors: list[Tensor | None]) -> list[np.ndarray | None]:
    """`read` for accelerators: everything is put into one tensor, and that is copied once."""
    there = [t for t in tensors if t is not None]
    home = next((t.device for t in there if t.device.type != "cpu"), torch.device("cpu"))
    flat = torch.cat([t.to(home, torch.float32).reshape(-1) for t in there]).cpu().numpy()
    found: list[np.ndarray | None] = []
    at = 0
    for t in tensors:
        if t is None:
            found.append(None)
            continue
        found.append(flat[at : at + t.numel()].reshape(tuple(t.shape)))
        at += t.numel()
    return found
