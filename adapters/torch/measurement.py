"""What is measured in one step, what the engine orders for it, and copying both to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.torch import norms


class Measurement(NamedTuple):
    """The signals of one step, as tensors next to the parameters. None is read on the host."""

    grad_norm: Tensor | None
    """0-d float32: global norm of the gradients as they are in `.grad`; None: there are none."""
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
    externally_skipped: Tensor | None = None
    """0-d bool: the GradScaler skips this step itself, so the engine ignores it."""
    learning_rate: Tensor | None = None
    """0-d float32: the largest rate of any group, as the user's schedule sets it."""
    state_init: bool = False
    """This may be the step with learning rate 0 by which torch.distributed.checkpoint makes a fresh
    optimizer allocate its state."""


class StepNorms(NamedTuple):
    """The gradient norms of a step that was judged: references, not read on the host."""

    params: Sequence[Tensor]
    """The parameters with a gradient."""
    norms: Sequence[Tensor]
    """0-d float32 each: norm of its gradient, times `grad_divisor`."""
    grad_divisor: Tensor | None

    def on_host(self) -> np.ndarray:
        """The norms as (n,) float32, unscaled. A sync on an accelerator.

        Sharded norms are reduced over the ranks: every rank has to call it for the same steps.
        """
        stacked, divisor = read([norms.vector(self.norms, self.norms[0].device), self.grad_divisor])
        assert stacked is not None
        with np.errstate(all="ignore"):
            return stacked if divisor is None else stacked / divisor


class HostOrder(NamedTuple):
    """What to enforce, as Python numbers."""

    skip: bool
    """Skip the step: the policy's skip, or a GradScaler's."""
    grad_scale: float
    lr_scale: float
    group_scale: np.ndarray | None
    """(n,) float32 factors, or None."""


class DeviceOrder(NamedTuple):
    """What to enforce, as tensors, for fused kernels that read it on the device."""

    found_inf: Tensor
    """0-d float32, exactly 0 or 1: 1 skips the step."""
    grad_divisor: Tensor
    """0-d float32: the fused kernel divides the gradients by it."""
    lr_scale: Tensor
    """0-d float32."""
    grad_scale: Tensor
    """0-d float32 in [0, 1]."""
    group_scale: Tensor | None
    """(n,) float32, or None."""


def read(tensors: list[Tensor | None]) -> list[Any]:
    """Copies float32 tensors to the host: no sync for CPU tensors, one for all on a device.

    Args:
        tensors: 0-d or 1-d float32, or None.

    Returns:
        NumPy scalars and arrays of the same shapes, copies; or None.
    """
    present = [t for t in tensors if t is not None]
    if all(t.device.type == "cpu" for t in present):
        # .numpy() shares memory and dispatches nothing (.item() would be a counted sync).
        return [None if t is None else _copied(t.numpy()) for t in tensors]
    return in_one_copy(tensors)


def _copied(array: np.ndarray) -> Any:
    return array.copy() if array.ndim else array[()]


def in_one_copy(tensors: list[Tensor | None]) -> list[np.ndarray | None]:
    """`read` for accelerators: everything is concatenated and copied once."""
    present = [t for t in tensors if t is not None]
    home = next((t.device for t in present if t.device.type != "cpu"), torch.device("cpu"))
    flat = torch.cat([t.to(home, torch.float32).reshape(-1) for t in present]).cpu().numpy()
    arrays: list[np.ndarray | None] = []
    at = 0
    for t in tensors:
        if t is None:
            arrays.append(None)
            continue
        arrays.append(flat[at : at + t.numel()].reshape(tuple(t.shape)))
        at += t.numel()
    return arrays
