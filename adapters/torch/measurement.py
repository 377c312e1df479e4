"""`Measurer`: measures the signals of one step next to the parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from healcore.core.numerics import FLOAT32_MAX
from healcore.core.signals import Signals
from healcore.torch import gradients
from healcore.torch.clip_order import ClipOrder
from healcore.torch.engines import LiveEngine, to_host
from healcore.torch.grad_scaler import DroppedSteps, Overflows
from healcore.torch.loss_mean import LossMean
from healcore.torch.ranks import StepRanks


class Measurement(NamedTuple):
    """What `Measurer.measure` has measured of one step, on this rank."""

    signals: Signals
    """The signals of this rank."""
    norms: Sequence[Tensor]
    """Norm of each gradient, 0-d on the gradient's device, with a GradScaler's scale."""
    squares: Tensor | None
    """This rank's terms of the squared norms, (1,) float64, or (1 + n,) with norms of n tensors.
    None if every rank has all gradients."""
    clip_norm: Tensor | None
    """Norm of all gradients as `torch.nn.utils.clip_grad_norm_` computes it, without a GradScaler's
    scale. None unless the policy has a fixed clip, and torch could clip here."""


class Measurer:
    """Collects the signals that the loop reports, and measures the gradients of one optimizer.

    The loop reports losses and evaluations whenever it has them. `measure`, at the start of
    `optimizer.step()`, measures the gradients and makes one `Measurement` of everything:

        observe, eval_loss ───────────┐
        p.grad of each parameter ─────┼─► measure ─► Measurement
        "lr" of each parameter group ─┘

    All signals are float32 on `home`, the device of the first parameter. Nothing is read on the
    host here, except numbers that are in host memory anyway.

    Args:
        live: the policy's engine with its state, which says what is measured.
        optimizer: the optimizer, with at least one parameter.
        home: the device of the first parameter.
        scaler: the GradScaler of the loop, or None.

    Attributes:
        eval_loss: loss of an evaluation since the last step, or NaN.
        has_seen_loss: whether any step has had a loss, including dropped steps.
        first_loss_is_late: whether the second step had the first loss, as if the loop observes each
            loss after its step.
        clip_order: the order in which the norm of a fixed clip is summed.
        losses: the losses since the last step.
        dropped: detects the steps that a GradScaler has dropped.
        overflows: marks the overflows of a GradScaler.
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
        # Of all parameters, because the last group may be empty.
        self._last_parameter = gradients.parameters(optimizer)[-1]
        self._grad_at_loss: weakref.ref[Tensor] | None = None
        """Gradient of `_last_parameter` when the last loss was observed, or None without one."""
        self.eval_loss: Tensor | float = math.nan
        self.has_seen_loss = False
        self.first_loss_is_late = False
        self._steps_without_loss = 0
        """Number of steps before the first step with a loss."""
        self.clip_order = ClipOrder()
        self.dropped = DroppedSteps(scaler, optimizer)
        self.overflows = Overflows(home)

    def clear(self) -> None:
        """Drops what the loop has reported since the last step."""
        self.losses.clear()
        self.eval_loss = math.nan

    def observe(self, loss: Tensor | float, weight: float) -> None:
        """Adds a loss of the current step. No host sync.

        Args:
            loss: what `one_number` has returned for the loss.
            weight: its weight in the mean, above 0.
        """
        grad = self._last_parameter.grad
        if grad is None:
            self._grad_at_loss = None
        else:
            self._grad_at_loss = weakref.ref(grad)
        self.losses.add(loss, weight)

    def measure(
        self, parameters: Sequence[Tensor], divisor: Tensor | None, ranks: StepRanks
    ) -> Measurement:
        """Measures the current step of this rank. Without gradients `grad_norm` is None.

        Args:
            parameters: all parameters of the optimizer; without a gradient the group norm is 0.
            divisor: a GradScaler's scale that the gradients still contain, or None.
            ranks: the ranks that step together.

        Returns:
            What this rank measures. The losses since the last step are used up.
        """
        self.dropped.stepped = True
        grads = gradients.reduced(parameters)
        norms, norm, clip_norm = self._norms(parameters, grads, ranks)
        group_norms: Tensor | None = None
        if self.engine.per_tensor or ranks.has_parts:
            group_norms = self._group_norms(parameters, norms)
        if divisor is not None:
            if norm is not None:
                norm = norm / divisor
            if clip_norm is not None:  # the scale is a power of two, so no bit is lost
                clip_norm = (clip_norm / divisor).to(clip_norm.dtype)
            if group_norms is not None:
                group_norms = group_norms / divisor
        squares: Tensor | None = None
        if group_norms is not None and ranks.has_parts:
            parts = ranks.squares(group_norms, parameters)
            squares = parts.sum().reshape(1)
            if self.engine.per_tensor:
                squares = torch.cat([squares, parts])
        if not self.engine.per_tensor:
            group_norms = None
        signals = self._signals(norm, group_norms, self._loss())
        return Measurement(signals, norms, squares, clip_norm)

    def clip_factor(self, clip_norm: Tensor, grad_scale: float | Tensor) -> Tensor | None:
        """The factor of `torch.nn.utils.clip_grad_norm_`, or None without a fixed clip.

        Args:
            clip_norm: see `Measurement`.
            grad_scale: the engine's factor. It replaces torch's where torch's norm overflows: a
                norm of float16 gradients is infinite above 65,504, and torch would clip to 0.

        Returns:
            The factor, 0-d in the dtype of `clip_norm` and on its device, at most 1.
        """
        if self._live.max_norm is None:
            return None
        factor = gradients.clip_factor(clip_norm, self._live.max_norm)
        if factor.dtype in (torch.float16, torch.bfloat16):
            own = torch.as_tensor(grad_scale, dtype=factor.dtype, device=factor.device)
            factor = torch.where(clip_norm.isfinite(), factor, own)
        return factor

    def _norms(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], ranks: StepRanks
    ) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
        """The norm of each gradient, of all gradients on `home`, and torch's norm for a fixed clip.

        torch's norm is the norm of all gradients too, unless its dtype is too narrow for the
        policy. Then the norms are computed a second time, in float32.
        """
        clip_norm: Tensor | None = None
        may_clip = self._live.max_norm is not None and self.may_clip_as_torch
        if may_clip and grads and not ranks.has_parts:
            measured = self.clip_order.norms(parameters, grads)
            if measured is not None:
                norms, clip_norm = measured
                if norms is not None:
                    return norms, gradients.to_device(clip_norm, self.home), clip_norm
        norms = gradients.norms(grads)
        if not grads:
            return norms, None, clip_norm
        return norms, gradients.total_norm(norms, self.home), clip_norm

    def _group_norms(self, parameters: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
        """The norm of each parameter's gradient as one vector, with 0 for a missing gradient."""
        remaining = iter(norms)
        norm_of_each: list[Tensor | None] = []
        for p in parameters:
            if p.grad is None:
                norm_of_each.append(None)
            else:
                norm_of_each.append(next(remaining))
        return gradients.norm_vector(norm_of_each, self.home)

    def _loss(self) -> Tensor | None:
        """The mean of the losses since the last step, or None without a loss.

        Backward passes add to a gradient in place. Another tensor means that the gradients are of
        the last loss only: the loop has skipped earlier batches. If the mean is not finite then,
        the last loss is the loss of the step.
        """
        loss = self.losses.mean()
        if loss is None or self.losses.count == 1:
            return loss
        before = None
        if self._grad_at_loss is not None:
            before = self._grad_at_loss()
        if self._last_parameter.grad is not before:
            loss = torch.where(loss.isfinite(), loss, self.losses.last())
        return loss

    def mark_bad_rates(self, signals: Signals) -> tuple[Signals, tuple[float, ...]]:
        """Marks a step as not finite if a learning rate is NaN or Inf, which spoils every weight.

        A rate above the largest float32 counts as Inf.

        A rate in a tensor on an accelerator is not read on the host: the mark is computed there,
        and the rate is not among the returned values.

        Args:
            signals: the signals of the step, with a `grad_norm`.

        Returns:
            The signals, with a `grad_norm` of NaN after a bad rate; and the bad rates of groups
            with gradients.
        """
        usual = True
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            # A float within float32, the usual rate, costs no call.
            if type(rate) is not float or not -FLOAT32_MAX <= rate <= FLOAT32_MAX:
                usual = False
        if usual:
            return signals, ()
        bad: list[float] = []
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and not rate.is_cpu:
                is_finite = self._at_home(rate).reshape(()).isfinite()
                assert signals.grad_norm is not None
                norm = torch.where(is_finite, signals.grad_norm, math.nan)
                signals = signals._replace(grad_norm=norm)
            elif rate is None or abs(rate) <= FLOAT32_MAX:
                continue
            elif any(p.grad is not None for p in group["params"]):
                bad.append(float(rate))
        if bad:
            assert signals.grad_norm is not None
            norm = torch.full_like(signals.grad_norm, math.nan)
            signals = signals._replace(grad_norm=norm)
        return signals, tuple(bad)

    def measure_dropped(self, tensors: int, *, alone: bool) -> Signals:
        """Measures a step that a GradScaler has dropped, see `DroppedSteps`.

        Its gradients have overflowed, so their norms are NaN. The evaluation is kept for the next
        step, which has a loss on several ranks too.

        Args:
            tensors: number of tensors, the parameters of the optimizer.
            alone: whether this rank decides alone. Its loss is used only then: the other ranks'
                losses of this step are not known.

        Returns:
            The signals of the step.
        """
        evaluation = self.eval_loss
        self.eval_loss = math.nan
        bad = torch.full((), math.nan, dtype=torch.float32, device=self.home)
        group_norms = None
        if self.engine.per_tensor:
            group_norms = bad.expand(tensors).clone()
        loss = None
        if alone:
            loss = self.losses.mean()
        signals = self._signals(bad, group_norms, loss)
        self.eval_loss = evaluation
        return self.overflows.mark(signals, torch.ones_like(bad))

    def _signals(
        self, norm: Tensor | None, group_norms: Tensor | None, loss: Tensor | None
    ) -> Signals:
        """Completes the signals with what the loop has reported, and drops the reports."""
        if not self.has_seen_loss:
            if self.losses.weight > 0:
                self.has_seen_loss = True
                self.first_loss_is_late = self._steps_without_loss == 1
            elif norm is not None:
                self._steps_without_loss += 1
        eval_loss = None
        if "eval_loss" in self.engine.needs:
            eval_loss = self._at_home(self.eval_loss)
        learning_rate = None
        if self._live.step_engine.limits_lr:
            learning_rate = self._learning_rate()
        self.clear()
        return Signals(
            loss=loss,
            grad_norm=norm,
            group_norms=group_norms,
            eval_loss=eval_loss,
            learning_rate=learning_rate,
        )

    def _at_home(self, value: Tensor | float) -> Tensor:
        """The value in float32 on `home`."""
        if isinstance(value, Tensor):
            return gradients.to_device(value, self.home, torch.float32)
        if abs(value) > FLOAT32_MAX:  # torch raises instead of rounding the number to Inf
            value = math.copysign(math.inf, value)
        return torch.full((), value, dtype=torch.float32, device=self.home)

    def _learning_rate(self) -> Tensor | None:
        """The largest rate of any group as the user's schedule sets it, or None without rates."""
        rates: list[Tensor] = []
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None:
                rates.append(self._at_home(rate).reshape(()))
        if not rates:
            return None
        return torch.stack(rates).amax()


class StepNorms(NamedTuple):
    """The gradient norms of a judged step, not read on the host yet.

    They become the evidence of an alarm: which tensors had unusual gradients. For a step without an
    alarm nothing is read, so the norms are kept on the device. The tensors are small, and the
    tensors of the last step without an alarm are kept for the comparison.
    """

    params: Sequence[Tensor]
    """Parameters with a gradient."""
    norms: Sequence[Tensor]
    """0-d float32 each: norm of this rank's part of the gradient, not divided by `grad_divisor`."""
    grad_divisor: Tensor | None
    """0-d float32: a GradScaler's scale that the gradients still contained, or None."""
    loss: Tensor | None = None
    """0-d float32: the loss that this rank has observed."""
    bad_rates: tuple[float, ...] = ()
    """Learning rates that were NaN or Inf."""

    def to_host(self) -> np.ndarray:
        """The norms of whole gradients on the host. A sync on an accelerator.

        Sharded norms are reduced over the ranks, so every rank has to call it for the same steps.

        Returns:
            (n,) float32: one norm for each of `params`, without a GradScaler's scale.
        """
        whole = gradients.whole_norms(self.norms, self.params)
        stacked = gradients.norm_vector(whole, whole[0].device)
        values, divisor = to_host([stacked, self.grad_divisor])
        with np.errstate(all="ignore"):
            if divisor is not None:
                values = values / divisor
        return values

    def rank_signals(self) -> tuple[float, float]:
        """The loss and the gradient norm of this rank alone. A sync.

        One of several ranks may have damaged data or a damaged device; the mean does not show it.

        Returns:
            Loss and norm of this rank's part of the gradients. NaN for what is absent.
        """
        loss = math.nan
        if self.loss is not None:
            loss = float(self.loss)
        if not self.norms:
            return loss, math.nan
        norm = float(gradients.total_norm(self.norms, self.norms[0].device))
        if self.grad_divisor is not None:
            norm /= float(self.grad_divisor)
        return loss, norm
