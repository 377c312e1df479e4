"""`Measurer`: measures the signals of one step next to the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from healcore.core.numerics import FLOAT32_MAX
from healcore.core.signals import Signals
from healcore.torch import gradients
from healcore.torch.grad_scaler import DroppedSteps, Overflows
from healcore.torch.live_engine import LiveEngine, to_host
from healcore.torch.loss_mean import LossMean, float32_tensor
from healcore.torch.ranks import StepRanks

STEPS_WITHOUT_LOSS = 20
"""Steps without a loss after which a warning is logged."""


class Measurement(NamedTuple):
    """What `Measurer.measure` has measured of one step, on this rank."""

    signals: Signals
    """The signals of this rank."""
    params: Sequence[Tensor]
    """The parameters with a gradient."""
    norms: Sequence[Tensor]
    """The norms of these gradients, 0-d on the gradient's device, with a GradScaler's scale."""
    squares: Tensor | None
    """This rank's terms of the squared norms, (1,) float64, or (1 + n,) with norms of n tensors.
    None if every rank has all gradients."""
    clip_norm: Tensor | None
    """Norm of all gradients as `torch.nn.utils.clip_grad_norm_` computes it, without a GradScaler's
    scale. None unless the policy has a fixed clip, and torch could clip here."""


class Measurer:
    """Collects the signals that the loop reports, and measures the gradients of one optimizer.

    The loop reports losses and evaluations whenever it has them. `measure`, at the start of
    `optimizer.step()`, measures the gradients and makes one `Measurement` of everything. All
    signals are float32 on `home`. Nothing is read on the host here, except numbers that are in host
    memory anyway.

    Args:
        live: the policy's engine with its state, which says what is measured.
        optimizer: the optimizer, with at least one parameter.
        home: the device of the first parameter.
        scaler: the GradScaler of the loop, or None.

    Attributes:
        losses: the losses since the last step.
        eval_loss: loss of an evaluation since the last step, or NaN.
        has_seen_loss: whether any step has had a loss, including dropped steps.
        modules: the modules of the run. A fixed clip sums the norms in the order of their
            parameters, as a program that clips `model.parameters()`: the last bits of a sum depend
            on its order, and an optimizer with several groups has another order.
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
        self.eval_loss: Tensor | float = math.nan
        self.has_seen_loss = False
        self._first_loss_is_late = False
        """Whether the second step had the first loss, as if a loss is observed after its step."""
        self._steps = 0
        """Number of judged steps."""
        self.modules: Sequence[nn.Module] = ()
        self._order: Sequence[int] = ()
        """Positions of the parameters in the order of `modules`."""
        self._ordered_ids: Sequence[int] = ()
        """Ids of the parameters for which `_order` holds."""
        self.dropped = DroppedSteps(scaler, optimizer)
        self.overflows = Overflows(home)

    def clear(self) -> None:
        """Drops what the loop has reported since the last step."""
        self.losses.clear()
        self.eval_loss = math.nan

    def measure(
        self, parameters: Sequence[Tensor], divisor: Tensor | None, ranks: StepRanks
    ) -> Measurement:
        """Measures the current step of this rank. Without gradients `grad_norm` is None.

        Args:
            parameters: all parameters of the optimizer; without a gradient the group norm is 0.
            divisor: a GradScaler's scale that the gradients still contain, or None.
            ranks: the ranks that step together.

        Returns:
            What this rank measures.
        """
        self.dropped.stepped = True
        clips = self._live.max_norm is not None and self.may_clip_as_torch and not ranks.has_parts
        ordered = parameters
        if clips and self.modules:
            ordered = self._in_clip_order(parameters)
        params = [p for p in ordered if p.grad is not None]
        grads = gradients.reduced(params)
        norms: Sequence[Tensor] | None = None
        norm: Tensor | None = None
        clip_norm: Tensor | None = None
        if clips and grads:
            # This norm is the norm of the step too, unless its dtype is too narrow for the policy.
            norms, clip_norm = gradients.norms_of_clip(grads)
            norm = clip_norm
        if norms is None:
            norms = gradients.norms(grads)
            norm = None
            if grads:
                norm = gradients.total_norm(norms, self.home)
        elif norm is not None:
            norm = gradients.to_device(norm, self.home)
        group_norms: Tensor | None = None
        if self.engine.per_tensor or ranks.has_parts:
            norm_of = dict(zip(map(id, params), norms, strict=True))
            group_norms = gradients.norm_vector([norm_of.get(id(p)) for p in parameters], self.home)
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
        signals = self._signals(norm, group_norms, self.losses.mean(), self.eval_loss)
        return Measurement(signals, params, norms, squares, clip_norm)

    def clip_factor(self, clip_norm: Tensor, grad_scale: float | Tensor) -> Tensor:
        """The factor of `torch.nn.utils.clip_grad_norm_` under a fixed clip.

        Args:
            clip_norm: see `Measurement`.
            grad_scale: the engine's factor. It replaces torch's where torch's norm overflows: a
                norm of float16 gradients is infinite above 65,504, and torch would clip to 0.

        Returns:
            The factor, 0-d in the dtype of `clip_norm` and on its device, at most 1.
        """
        assert self._live.max_norm is not None
        # torch computes `number / tensor` as a product with the reciprocal. A division differs in
        # the last bit.
        factor = torch.clamp(self._live.max_norm / (clip_norm + 1e-6), max=1.0)
        if factor.dtype in gradients.HALVES:
            own = torch.as_tensor(grad_scale, dtype=factor.dtype, device=factor.device)
            factor = torch.where(clip_norm.isfinite(), factor, own)
        return factor

    def _in_clip_order(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters in the order of `modules`; those outside of the modules come last."""
        ids = [*map(id, parameters)]
        if ids != self._ordered_ids:
            visited = [p for module in self.modules for p in module.parameters()]
            places = {id(p): place for place, p in enumerate(visited)}
            self._ordered_ids = ids
            self._order = sorted(range(len(ids)), key=lambda i: places.get(ids[i], len(visited)))
        return [parameters[i] for i in self._order]

    def measure_dropped(self, tensors: int, *, alone: bool) -> Signals:
        """Measures a step that a GradScaler has dropped, see `DroppedSteps`.

        Its gradients have overflowed, so their norms are NaN. The evaluation is kept for the next
        step, which has a loss on several ranks too.

        Args:
            tensors: number of tensors, the parameters of the optimizer.
            alone: whether this rank decides alone. Its loss is used only then: the other ranks'
                losses of this step are not known.

        Returns:
            The signals of the step. The losses since the last step are used up.
        """
        bad = float32_tensor(math.nan, self.home)
        group_norms = None
        if self.engine.per_tensor:
            group_norms = bad.expand(tensors).clone()
        loss = None
        if alone:
            loss = self.losses.mean()
        signals = self._signals(bad, group_norms, loss, math.nan)
        self.losses.clear()
        return self.overflows.mark(signals, torch.ones_like(bad))

    def _signals(
        self,
        norm: Tensor | None,
        group_norms: Tensor | None,
        loss: Tensor | None,
        evaluation: Tensor | float,
    ) -> Signals:
        """The signals, as far as the policy reads them."""
        if self.losses.weight and not self.has_seen_loss:
            self.has_seen_loss = True
            self._first_loss_is_late = self._steps == 1
        eval_loss = None
        if "eval_loss" in self.engine.needs:
            eval_loss = float32_tensor(evaluation, self.home)
        learning_rate = None
        if self._live.step_engine.limits_lr:
            learning_rate = self._learning_rate()
        return Signals(
            loss=loss,
            grad_norm=norm,
            group_norms=group_norms,
            eval_loss=eval_loss,
            learning_rate=learning_rate,
        )

    def _learning_rate(self) -> Tensor | None:
        """The largest rate of any group as the user's schedule sets it, or None without rates."""
        rates: list[Tensor] = []
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None:
                rates.append(float32_tensor(rate, self.home).reshape(()))
        if not rates:
            return None
        return torch.stack(rates).amax()

    def mark_bad_rates(self, signals: Signals) -> tuple[Signals, list[float]]:
        """Marks a step as not finite if a learning rate is NaN or Inf, which spoils every weight.

        A rate above the largest float32 counts as Inf. Rates of groups without gradients may be
        anything. A rate in a tensor on an accelerator is not read on the host: the mark is computed
        there.

        Args:
            signals: the signals of the step, with a `grad_norm`.

        Returns:
            The signals, with a `grad_norm` of NaN after a bad rate; and the rates that are on the
            host.
        """
        norm = signals.grad_norm
        assert norm is not None
        rates: list[float] = []
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and not rate.is_cpu:
                is_finite = float32_tensor(rate, self.home).reshape(()).isfinite()
                norm = torch.where(is_finite, norm, math.nan)
            elif rate is None:
                continue
            elif abs(rate) <= FLOAT32_MAX:
                rates.append(float(rate))
            elif any(p.grad is not None for p in group["params"]):
                rates.append(float(rate))
                norm = torch.full_like(norm, math.nan)
        return signals._replace(grad_norm=norm), rates

    def missing_loss(self, *, observed: bool) -> str:
        """Counts a judged step, and notices once that the loop observes no loss, or all too late.

        Without a loss, detectors would be disabled silently. After its step, a loss would be judged
        with the gradient of the next step.

        Args:
            observed: whether the loop has observed any loss for any optimizer.

        Returns:
            A line for the log, nearly always empty.
        """
        self._steps += 1
        if "loss" not in self.engine.needs:
            return ""
        if self._steps == 2 and self._first_loss_is_late:
            return (
                "the first step had no loss, and the second step has one: if the loop observes "
                "each loss after its step, the loss is judged with the gradient of the next step. "
                "Then call observe(loss) before optimizer.step()"
            )
        if self._steps == STEPS_WITHOUT_LOSS and not observed:
            return (
                f"no loss has been observed in {STEPS_WITHOUT_LOSS} steps, so detectors that read "
                "it are inactive: write loss = healer.loss(batch) if the Healer has a loss_fn, or "
                "call observe(loss) before each optimizer.step()"
            )
        return ""


class StepNorms(NamedTuple):
    """The gradient norms of a judged step, not read on the host yet.

    They become the evidence of an alarm: which tensors had unusual gradients. For a step without an
    alarm nothing is read, so the norms are kept on the device. The tensors are small, and the
    tensors of the last step without an alarm are kept for the comparison.
    """

    params: Sequence[Tensor] = ()
    """Parameters with a gradient."""
    norms: Sequence[Tensor] = ()
    """0-d float32 each: norm of this rank's part of the gradient, not divided by `grad_divisor`."""
    grad_divisor: Tensor | None = None
    """0-d float32: a GradScaler's scale that the gradients still contained, or None."""
    loss: Tensor | None = None
    """0-d float32: the loss that this rank has observed."""
    rates: Sequence[float] = ()
    """Learning rates of the groups, as far as they are on the host."""

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
