"""Measures the signals of one step, and copies tensors to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.core.signals import Signals
from healcore.torch import gradients
from healcore.torch.grad_scaler import DroppedSteps, Overflows
from healcore.torch.losses import LossMean, checked
from healcore.torch.ranks import StepRanks

_SIDE_SIGNALS = {"eval_loss": math.nan, "update_norm": None}
"""Optional signals -> default value, or None if the signal is absent by default."""


class Measurement(NamedTuple):
    """The signals of one step, as tensors next to the parameters, not read on the host."""

    grad_norm: Tensor | None
    """0-d float32: norm of this rank's gradients, global once reduced; None without gradients."""
    loss: Tensor | None = None
    """0-d float32: mean over the micro-batches of this step."""
    group_norms: Tensor | None = None
    """(n,) float32: norm of each parameter's gradient, or 0. Local or global like `grad_norm`."""
    squares: Tensor | None = None
    """(1,) float64, or (1 + n,) with `group_norms`: this rank's terms of the squared norms. None
    after the reduction, or if every rank has all gradients."""
    eval_loss: Tensor | None = None
    """0-d float32, NaN at a step without an evaluation."""
    update_norm: Tensor | None = None
    """0-d float32: norm of the previous update."""
    grad_divisor: Tensor | None = None
    """0-d float32: a GradScaler's scale, which the gradients still contain."""
    found_inf: Tensor | None = None
    """0-d float32: above 0 if a GradScaler has found an overflow and skips this step."""
    externally_skipped: Tensor | None = None
    """0-d bool: the GradScaler skips this step, so the engine ignores it."""
    learning_rate: Tensor | None = None
    """0-d float32: the largest rate of any group, as the user's schedule sets it."""


def signals_of(measured: Measurement) -> Signals:
    """The engine's signals of a measurement, whose values are torch tensors or NumPy scalars."""
    norm, groups = measured.grad_norm, measured.group_norms
    assert norm is not None
    if measured.grad_divisor is not None:
        norm = norm / measured.grad_divisor
        groups = None if groups is None else groups / measured.grad_divisor
    return Signals(
        loss=measured.loss,
        grad_norm=norm,
        group_norms=groups,
        eval_loss=measured.eval_loss,
        update_norm=measured.update_norm,
        externally_skipped=measured.externally_skipped,
        learning_rate=measured.learning_rate,
    )


class StepNorms(NamedTuple):
    """The gradient norms of a judged step, not read on the host."""

    params: Sequence[Tensor]
    """Parameters with a gradient."""
    norms: Sequence[Tensor]
    """0-d float32 each: norm of this rank's part of the gradient, not divided by `grad_divisor`."""
    grad_divisor: Tensor | None
    loss: Tensor | None = None
    """0-d float32: the loss that this rank has observed."""

    def to_host(self) -> np.ndarray:
        """The norms as (n,) float32, divided by `grad_divisor`. A sync on an accelerator.

        Sharded norms are reduced over the ranks, so every rank has to call it for the same steps.
        """
        whole = gradients.whole_norms(self.norms, self.params)
        stacked = gradients.norm_vector(whole, whole[0].device)
        values, divisor = read([stacked, self.grad_divisor])
        with np.errstate(all="ignore"):
            return values if divisor is None else values / divisor

    def rank_signals(self) -> tuple[float, float]:
        """The loss and the gradient norm of this rank alone, NaN if absent. A sync."""
        loss = math.nan if self.loss is None else float(self.loss)
        if not self.norms:
            return loss, math.nan
        whole = gradients.total_norm(self.norms, self.norms[0].device)
        divisor = 1.0 if self.grad_divisor is None else float(self.grad_divisor)
        return loss, float(whole) / divisor


class Measurer:
    """Collects the signals that the loop reports, and measures the gradients of one optimizer.

    All measured signals are on `home`, the device of the first parameter.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        home: torch.device,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.engine = engine
        self.home = home
        self.has_seen_loss = False
        """Whether any step has had a loss, including dropped steps."""
        self.tensor_norms: Sequence[Tensor] = ()
        """Norm of each gradient at the last step, 0-d float32, on the gradient's device."""
        self._optimizer = optimizer
        self.losses = LossMean(home)
        self.dropped = DroppedSteps(scaler, optimizer)
        self.overflows = Overflows(home)
        self._side_signals: dict[str, Tensor | float] = {}

    def add_loss(self, loss: Tensor | float, name: str = "loss", *, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss. SignalError, and no change, if it is not a number."""
        self.losses.add(checked(name, loss), weight)

    def add_side_signal(self, name: str, value: Tensor | float) -> None:
        """Sets a side signal of the next step. SignalError if it is not a number."""
        self._side_signals[name] = checked(name, value)

    @property
    def has_loss(self) -> bool:
        """Whether a loss was observed since the last step."""
        return self.losses.weight > 0

    def drop_losses(self) -> None:
        """Drops the losses since the last step."""
        self.losses.clear()

    def clear(self) -> None:
        """Drops losses and side signals since the last step."""
        self.drop_losses()
        self._side_signals.clear()

    def measure(
        self,
        all_parameters: Sequence[Tensor],
        *,
        grad_divisor: Tensor | None,
        found_inf: Tensor | None,
        ranks: StepRanks,
    ) -> Measurement:
        """Measures the current step. `all_parameters` is all parameters of the optimizer."""
        self.dropped.stepped = True
        self.has_seen_loss |= self.has_loss
        gradients.complete_(all_parameters)
        each = gradients.norms([grad for p in all_parameters if (grad := p.grad) is not None])
        self.tensor_norms = each
        by_parameter = squares = None
        if self.engine.per_tensor or ranks.has_parts:
            remaining = iter(each)
            by_parameter = gradients.norm_vector(
                [None if p.grad is None else next(remaining) for p in all_parameters], self.home
            )
        group_norms = by_parameter if self.engine.per_tensor else None
        if by_parameter is not None and ranks.has_parts:
            parts = ranks.squares(by_parameter, all_parameters)
            squares = parts.sum().reshape(1)
            if group_norms is not None:
                squares = torch.cat([squares, parts])
        return Measurement(
            grad_norm=gradients.total_norm(each, self.home) if each else None,
            loss=self.losses.mean(),
            group_norms=group_norms,
            squares=squares,
            eval_loss=self._side_signal("eval_loss"),
            update_norm=self._side_signal("update_norm"),
            grad_divisor=self._at_home(grad_divisor),
            found_inf=self._at_home(found_inf),
            learning_rate=self._learning_rate(),
        )

    def mark_overflow(self, measured: Measurement) -> Measurement:
        """Marks an overflow: externally skipped, or non-finite after too many in a row.

        A step with a non-finite loss is non-finite too, because no scale makes the loss finite.
        """
        if measured.found_inf is None or measured.grad_norm is None:
            self.overflows.reset()
            return measured
        skipped = self.overflows.externally_skipped(measured.found_inf)
        if measured.loss is not None:
            skipped = skipped & torch.isfinite(measured.loss)
        counted = (measured.found_inf > 0) & ~skipped
        return measured._replace(
            externally_skipped=skipped,
            grad_norm=measured.grad_norm.masked_fill(counted, math.nan),
        )

    def measure_dropped(self, groups: int, *, alone: bool) -> Measurement:
        """Measures a step that a GradScaler skipped without calling the optimizer.

        Drops its losses. Uses its loss only if the rank decides `alone`.
        """
        self.has_seen_loss |= self.has_loss
        loss = self.losses.mean() if alone else None
        bad = torch.full((), math.nan, dtype=torch.float32, device=self.home)
        measured = Measurement(
            grad_norm=bad,
            loss=None if loss is None else loss.clone(),
            group_norms=bad.expand(groups).clone() if self.engine.per_tensor else None,
            eval_loss=self._side_signal("eval_loss"),
            update_norm=self._side_signal("update_norm"),
            found_inf=torch.ones_like(bad),
            learning_rate=self._learning_rate(),
        )
        self.clear()
        return self.mark_overflow(measured)

    def _side_signal(self, name: str) -> Tensor | None:
        """A side signal as a tensor, or None if it is absent or the policy does not read it."""
        value = self._side_signals.get(name, _SIDE_SIGNALS[name])
        if value is None or name not in self.engine.needs:
            return None
        if isinstance(value, Tensor):
            return value.to(self.home, torch.float32, non_blocking=True)
        return torch.full((), value, dtype=torch.float32, device=self.home)

    def _learning_rate(self) -> Tensor | None:
        """The largest rate of any group, 0-d float32, or None if the policy cannot limit it."""
        if not self.engine.limits_lr:
            return None
        groups = self._optimizer.param_groups
        rates = [lr for group in groups if (lr := group.get("lr")) is not None]
        if not rates:
            return None
        if not any(isinstance(rate, Tensor) for rate in rates):
            return torch.full((), max(rates), dtype=torch.float32, device=self.home)
        each = [torch.as_tensor(r, dtype=torch.float32).detach().to(self.home) for r in rates]
        return torch.stack([rate.reshape(()) for rate in each]).amax()

    def _at_home(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.detach().to(self.home, torch.float32, non_blocking=True)


# -- copies to the host ---------------------------------------------------------------------------


def read(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Converts 0-d and 1-d float32 tensors to NumPy. One sync on an accelerator, none on a CPU."""
    values: list[Any] = []
    for t in tensors:
        if t is None:
            values.append(None)
        elif t.is_cpu:
            # .numpy() shares memory and dispatches nothing (.item() would be a counted sync).
            array = t.numpy()
            values.append(array.copy() if array.ndim else array[()])
        else:
            return read_in_one_copy(tensors)
    return values


def read_in_one_copy(tensors: Sequence[Tensor | None]) -> list[Any]:
    """`read` for accelerators: all tensors are concatenated and copied once."""
    present = [t for t in tensors if t is not None]
    home = next((t.device for t in present if t.device.type != "cpu"), torch.device("cpu"))
    flat = torch.cat([t.to(home, torch.float32).reshape(-1) for t in present]).cpu().numpy()
    parts = iter(np.split(flat, np.cumsum([t.numel() for t in present])[:-1]))
    return [None if t is None else next(parts).reshape(tuple(t.shape))[()] for t in tensors]


class AsyncCopy:
    """An asynchronous copy of a CUDA tensor to the host; the tensor may be overwritten at once.

    On other devices `read` reads the tensor itself.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            tensor, device = _copied_to_pinned(tensor), tensor.device
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        self._tensor = tensor

    def has_arrived(self) -> bool:
        """Whether `read` would return without waiting, or True if this is unknown."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """The values. Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.cpu().numpy()


def _copied_to_pinned(tensor: Tensor) -> Tensor:
    """Starts a copy of a CUDA tensor to pinned host memory. Returns the host tensor."""
    if torch.cuda.is_current_stream_capturing():
        raise AttachError(
            "optimizer.step() is being captured in a CUDA graph, whose replays run no hooks: the "
            "Healer would not see them; call step() outside of the graph, or use attach() alone"
        )
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
