"""Measures the signals of one step next to the parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from healcore.core.numerics import FLOAT32_MAX
from healcore.core.signals import SignalError, Signals, check_scalar
from healcore.torch import gradients
from healcore.torch.engines import LiveEngine, to_host
from healcore.torch.ranks import StepRanks

MAX_OVERFLOWS = 40
"""Consecutive overflows that a GradScaler may need to find its scale, from its default 2^16 to
below 2^-23. At that scale only non-finite gradients overflow."""


class Measurer:
    """Collects the signals that the loop reports, and measures the gradients of one optimizer.

    All signals are float32 on `home`, the device of the first parameter.

    Attributes:
        eval_loss: loss of an evaluation since the last step, or NaN.
        has_seen_loss: whether any step has had a loss, including dropped steps.
        norms: norm of each gradient at the last step, 0-d on the gradient's device.
        squares: this rank's terms of the squared norms at the last step, (1,) float64, or
            (1 + n,) with norms of n groups. None if every rank has all gradients.
        clip_norm: norm of all gradients as `torch.nn.utils.clip_grad_norm_` computes it, without a
            GradScaler's scale. None unless the policy has a fixed clip, and torch could clip here.
    """

    may_clip_as_torch = True
    """Whether the optimizer has whole gradients, as its program's own clip would have."""

    def __init__(
        self, live: LiveEngine, optimizer: Optimizer, home: torch.device, scaler: GradScaler | None
    ) -> None:
        self._live = live
        self.engine = live.engine
        self.home = home
        self._optimizer = optimizer
        self.losses = LossMean(home)
        self._last_parameter = gradients.parameters(optimizer)[-1]  # a group may be empty
        self._grad: weakref.ref[Tensor] | None = None  # of `_last_parameter`, at the last loss
        self.eval_loss: Tensor | float = math.nan
        self.has_seen_loss = False
        self.norms: Sequence[Tensor] = ()
        self.squares: Tensor | None = None
        self._modules: Sequence[nn.Module] = ()
        self.clip_norm: Tensor | None = None
        self._clip_order: list[int] = []
        """Positions of the optimizer's parameters in the order of `_modules`."""
        self._is_reordered = False
        """Whether this order is not the order of the optimizer."""
        self.dropped = DroppedSteps(scaler, optimizer)
        self.overflows = Overflows(home)

    def use_order_of(self, modules: Sequence[nn.Module]) -> None:
        """Sums the norms of a fixed clip in the order of the modules' parameters.

        A program clips `model.parameters()`, and the last bits of a sum depend on its order. An
        optimizer with several parameter groups has another order.
        """
        self._modules, self._clip_order = modules, []

    def clear(self) -> None:
        """Drops what the loop has reported since the last step."""
        self.losses.clear()
        self.eval_loss = math.nan

    def observe(self, loss: Tensor | float, weight: float) -> None:
        """Adds a loss of the current step."""
        grad = self._last_parameter.grad
        self._grad = None if grad is None else weakref.ref(grad)
        self.losses.add(loss, weight)

    def measure(
        self, parameters: Sequence[Tensor], divisor: Tensor | None, ranks: StepRanks
    ) -> Signals:
        """Measures the current step of this rank. Without gradients `grad_norm` is None.

        Args:
            parameters: all parameters of the optimizer; without a gradient the group norm is 0.
            divisor: a GradScaler's scale that the gradients still contain, or None.
            ranks: the ranks that step together.
        """
        self.dropped.stepped = True
        gradients.complete_(parameters)
        grads = [grad for p in parameters if (grad := p.grad) is not None]
        norm = self.clip_norm = None
        if self._live.max_norm is not None and self.may_clip_as_torch and not ranks.has_parts:
            norm = self._measure_as_clip(parameters, grads)
        if norm is None:
            self.norms = gradients.norms(grads)
            norm = gradients.total_norm(self.norms, self.home) if grads else None
        group_norms = self.squares = None
        if self.engine.per_tensor or ranks.has_parts:
            remaining = iter(self.norms)
            group_norms = gradients.norm_vector(
                [None if p.grad is None else next(remaining) for p in parameters], self.home
            )
        if divisor is not None:
            norm = None if norm is None else norm / divisor
            if self.clip_norm is not None:  # the scale is a power of two, so no bit is lost
                self.clip_norm = (self.clip_norm / divisor).to(self.clip_norm.dtype)
            group_norms = None if group_norms is None else group_norms / divisor
        if group_norms is not None and ranks.has_parts:
            parts = ranks.squares(group_norms, parameters)
            total = parts.sum().reshape(1)
            self.squares = torch.cat([total, parts]) if self.engine.per_tensor else total
        loss = self.losses.mean()
        if loss is not None and self.losses.count > 1:
            grad = self._last_parameter.grad
            before = None if self._grad is None else self._grad()
            if grad is not before:  # backward passes add to a gradient in place
                # The gradients are of the last loss only: the loop has left out earlier batches.
                loss = torch.where(loss.isfinite(), loss, self.losses.last())
        return self._signals(norm, group_norms if self.engine.per_tensor else None, loss)

    def clip_factor(self, grad_scale: float | Tensor) -> Tensor | None:
        """The factor of `torch.nn.utils.clip_grad_norm_`, or None if `clip_norm` is None.

        Args:
            grad_scale: the engine's factor. It replaces torch's where torch's norm overflows: a
                norm of float16 gradients is infinite above 65,504, and torch would clip to 0.
        """
        if self.clip_norm is None or self._live.max_norm is None:
            return None
        factor = gradients.clip_factor(self.clip_norm, self._live.max_norm)
        if factor.dtype in (torch.float16, torch.bfloat16):
            own = torch.as_tensor(grad_scale, dtype=factor.dtype, device=factor.device)
            factor = torch.where(self.clip_norm.isfinite(), factor, own)
        return factor

    def _measure_as_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Tensor | None:
        """Sets `clip_norm`. If it is float32, also sets `norms`, and returns it on `home`."""
        measured = self._norms_of_clip(parameters, grads) if grads else None
        if measured is None:
            return None
        each, total = measured
        self.clip_norm = total
        if each is None:
            return None
        self.norms = each
        return gradients.moved(total, self.home)

    def _norms_of_clip(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> Any:
        """`gradients.norms_of_clip` in the modules' order; the norms are in the optimizer's."""
        if len(self._clip_order) != len(parameters):
            known = (p for module in self._modules for p in module.parameters())
            places = {id(p): place for place, p in enumerate(known)}
            order = [(places.get(id(p), len(places)), i) for i, p in enumerate(parameters)]
            self._clip_order = [i for _, i in sorted(order)]
            self._is_reordered = self._clip_order != [*range(len(parameters))]
        if not self._is_reordered:
            return gradients.norms_of_clip(grads)
        present = [i for i in self._clip_order if parameters[i].grad is not None]
        measured = gradients.norms_of_clip([parameters[i].grad for i in present])  # type: ignore[misc]
        if measured is None or measured[0] is None:
            return measured
        each = [norm for _, norm in sorted(zip(present, measured[0], strict=True), key=_first)]
        return each, measured[1]

    def mark_bad_rates(self, signals: Signals) -> tuple[Signals, tuple[float, ...]]:
        """Marks a step as not finite if a learning rate is NaN or Inf, which spoils every weight.

        A rate in a tensor on an accelerator is not read on the host. Also returns the bad rates.
        """
        bad: list[float] = []
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and not rate.is_cpu:
                is_finite = self._at_home(rate).reshape(()).isfinite()
                norm = torch.where(is_finite, signals.grad_norm, math.nan)
                signals = signals._replace(grad_norm=norm)
            elif rate is None or math.isfinite(rate):
                continue
            elif any(p.grad is not None for p in group["params"]):
                bad.append(float(rate))
        if bad:
            norm = torch.full_like(signals.grad_norm, math.nan)
            signals = signals._replace(grad_norm=norm)
        return signals, tuple(bad)

    def measure_dropped(self, groups: int, *, alone: bool) -> Signals:
        """Measures a step of `DroppedSteps`. Uses its loss only if the rank decides `alone`.

        The evaluation is kept for the next step, which has a loss on several ranks too.
        """
        evaluation, self.eval_loss = self.eval_loss, math.nan
        bad = torch.full((), math.nan, dtype=torch.float32, device=self.home)
        group_norms = bad.expand(groups).clone() if self.engine.per_tensor else None
        signals = self._signals(bad, group_norms, self.losses.mean() if alone else None)
        self.eval_loss = evaluation
        return self.overflows.mark(signals, torch.ones_like(bad))

    def _signals(self, norm: Any, group_norms: Any, loss: Any) -> Signals:
        """Completes the signals with what the loop has reported, and drops the reports."""
        self.has_seen_loss |= self.losses.weight > 0
        signals = Signals(
            loss=loss,
            grad_norm=norm,
            group_norms=group_norms,
            eval_loss=self._at_home(self.eval_loss) if "eval_loss" in self.engine.needs else None,
            learning_rate=self._learning_rate() if self._live.stepping.limits_lr else None,
        )
        self.clear()
        return signals

    def _at_home(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return gradients.moved(value, self.home, torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self.home)

    def _learning_rate(self) -> Tensor | None:
        """The largest rate of any group as the user's schedule sets it, or None without rates."""
        rates = [rate for g in self._optimizer.param_groups if (rate := g.get("lr")) is not None]
        found = [self._at_home(rate).reshape(()) for rate in rates]
        return torch.stack(found).amax() if found else None


class StepNorms(NamedTuple):
    """The gradient norms of a judged step, not read on the host yet."""

    params: Sequence[Tensor]
    """Parameters with a gradient."""
    norms: Sequence[Tensor]
    """0-d float32 each: norm of this rank's part of the gradient, not divided by `grad_divisor`."""
    grad_divisor: Tensor | None
    loss: Tensor | None = None
    """0-d float32: the loss that this rank has observed."""
    bad_rates: tuple[float, ...] = ()
    """Learning rates that were NaN or Inf."""

    def to_host(self) -> np.ndarray:
        """The norms as (n,) float32, divided by `grad_divisor`. A sync on an accelerator.

        Sharded norms are reduced over the ranks, so every rank has to call it for the same steps.
        """
        whole = gradients.whole_norms(self.norms, self.params)
        stacked = gradients.norm_vector(whole, whole[0].device)
        values, divisor = to_host([stacked, self.grad_divisor])
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


def _first(pair: tuple[int, Tensor]) -> int:
    return pair[0]


def one_number(name: str, value: Any) -> Tensor | float:
    """Checks one number. Returns a float, or a detached 0-d tensor of its own device and dtype.

    No host sync. NaN is accepted.

    Raises:
        SignalError: `value` is not a single real number.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        is_real = not (value.is_complex() or value.dtype is torch.bool or value.is_meta)
        if value.numel() != 1 or not is_real:
            raise SignalError(
                f"{name} must be one real number, got a tensor of shape {tuple(value.shape)}, "
                f"{value.dtype} on {value.device}: pass {name}.float().mean()"
            )
        if type(value) is not Tensor and hasattr(value, "full_tensor"):
            value = value.full_tensor()  # a DTensor
        return value.reshape(()) if value.ndim else value
    return float(check_scalar(name, value))


class LossMean:
    """Weighted mean of the losses since the last step, on the parameters' device, without a sync.

    No sum shares memory with a loss, because a loop may change the loss in place after `observe`
    (``loss /= steps``).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def add(self, loss: Tensor | float, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss, which `one_number` has returned."""
        if isinstance(loss, Tensor) and not loss.is_cpu:
            value = gradients.moved(loss, self._device, torch.float32) * weight
        else:
            # As a number, because copying pageable memory to an accelerator is a sync. As a double,
            # because NumPy lacks some dtypes of torch.
            number = float(loss.double().numpy() if isinstance(loss, Tensor) else loss) * weight
            if abs(number) > FLOAT32_MAX:
                number *= math.inf  # `full` would raise, but any other cast gives infinity
            value = torch.full((), number, dtype=torch.float32, device=self._device)
        self._total = self._total + value if self.count else value
        self._last, self._last_weight = value, weight
        self.count += 1
        self.weight += weight

    def mean(self) -> Tensor | None:
        """0-d float32, or None without losses."""
        return _quotient(self._total, self.weight) if self.count else None

    def last(self) -> Tensor:
        """The last loss, 0-d float32."""
        return _quotient(self._last, self._last_weight)

    def clear(self) -> None:
        """Drops the losses since the last step."""
        self.count = 0
        self.weight = 0.0


def _quotient(total: Tensor, weight: float) -> Tensor:
    # Not `total / weight`: on CUDA that is a multiplication by the reciprocal.
    return total if weight == 1.0 else total / torch.full_like(total, weight)


# -- steps that a GradScaler skips ----------------------------------------------------------------


class DroppedSteps:
    """Detects, without a sync, that a GradScaler skipped a step without calling the optimizer.

    After an overflow a GradScaler does not call `step()` of an optimizer that is not fused. But
    `update()` replaces the scaler's per-optimizer records. The old records show whether the loop
    asked the scaler to step this optimizer.
    """

    def __init__(self, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        self._scaler = scaler
        self._key = id(optimizer)
        self.stepped = False
        """Whether the optimizer has stepped since the last `update()`. The caller sets it."""
        self._records = None if scaler is None else scaler._per_optimizer_states

    def take(self) -> bool:
        """Whether a step was skipped since the last call. Call it at least once per step."""
        if self._scaler is None or self._scaler._per_optimizer_states is self._records:
            return False
        old, self._records = self._records, self._scaler._per_optimizer_states
        stepped, self.stepped = self.stepped, False
        asked = old is not None and self._key in old and old[self._key]["stage"] is OptState.STEPPED
        return asked and not stepped


class Overflows:
    """Distinguishes a GradScaler's search for its scale from gradients that overflow at any scale.

    After an overflow a scaler skips the step and halves its scale, which is normal. After `search`
    consecutive overflows the gradients overflow at any scale, and the steps count as non-finite.
    """

    def __init__(self, home: torch.device, search: int = MAX_OVERFLOWS) -> None:
        self._home = home
        self._search = search
        self._consecutive: Tensor | None = None
        """0-d int32, or None after a step without a scaler's flag."""

    def mark(self, signals: Signals, found_inf: Tensor | None) -> Signals:
        """Marks an overflow as externally skipped, or as non-finite after too many in a row.

        A step with a non-finite loss is non-finite too, because no scale makes the loss finite.
        `found_inf` is a scaler's flag on `home`, above 0 for an overflow, or None.
        """
        if found_inf is None:
            self._consecutive = None
            return signals
        if self._consecutive is None:
            self._consecutive = torch.zeros((), dtype=torch.int32, device=self._home)
        overflowed = found_inf > 0
        self._consecutive = torch.where(overflowed, self._consecutive + 1, 0)
        skipped = overflowed & (self._consecutive <= self._search)
        if signals.loss is not None:
            skipped = skipped & torch.isfinite(signals.loss)
        norm = signals.grad_norm.masked_fill(overflowed & ~skipped, math.nan)
        return signals._replace(externally_skipped=skipped, grad_norm=norm)
