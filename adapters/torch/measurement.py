"""Measures one step next to the parameters: losses, gradients, rates, and a GradScaler's overflows.

LossMean        the mean of the losses that the loop reports for one step
DroppedSteps    detects the steps that a GradScaler has dropped
Overflows       distinguishes a GradScaler's search for its scale from bad gradients
Measurer        makes one `Measurement` of a step
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from healcore.core.array_namespace import FLOAT32_MAX
from healcore.core.signals import SignalError, Signals, check_scalar
from healcore.torch import gradients
from healcore.torch.live_engine import LiveEngine, to_host
from healcore.torch.ranks import StepRanks

STEPS_WITHOUT_LOSS = 20
"""Steps without a loss after which a warning is logged."""
MAX_OVERFLOWS = 40
"""Consecutive overflows that a GradScaler may need to find its scale, from its default 2^16 to
below 2^-23. At that scale only non-finite gradients overflow."""


def one_number(name: str, value: Any) -> Tensor | float:
    """Checks one number that the loop reports. No host sync, and NaN is accepted.

    Args:
        name: what the number is, for the message.
        value: a number, or a tensor of one element, also a DTensor.

    Returns:
        A float, or a detached 0-d tensor of the value's own device and dtype.

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
        if value.ndim:
            value = value.reshape(())
        return value
    return float(check_scalar(name, value))


def float32_tensor(value: Tensor | float, device: torch.device) -> Tensor:
    """A number in float32 on a device. No host sync.

    Args:
        value: what `one_number` has returned, or a number.
        device: the device of the result.

    Returns:
        0-d float32; a float32 tensor of this device is returned itself.
    """
    if isinstance(value, Tensor):
        if not value.is_cpu or device.type == "cpu":
            return gradients.to_device(value, device, torch.float32)
        # As a number, because copying pageable memory to an accelerator is a sync. As a double,
        # because NumPy lacks some dtypes of torch.
        value = float(value.double().numpy())
    if abs(value) > FLOAT32_MAX:  # `full` raises instead of rounding the number to Inf
        value = math.copysign(math.inf, value)
    return torch.full((), value, dtype=torch.float32, device=device)


class LossMean:
    """Weighted mean of the losses since the last step, on the parameters' device, without a sync.

    Args:
        device: the parameters' device.

    Attributes:
        count: number of losses since the last step.
        weight: sum of their weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def add(self, loss: Tensor | float, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss. No host sync.

        Args:
            loss: what `one_number` has returned for the loss.
            weight: its weight in the mean, above 0.
        """
        value = float32_tensor(loss, self._device)
        if weight != 1.0:
            value = value * weight
        elif value is loss:
            value = value.clone()  # a loop may change its loss in place later (``loss /= steps``)
        self._last = value, weight
        if self.count:
            value = self._total + value
        self._total = value
        self.weight += weight
        self.count += 1

    def mean(self, norm: Tensor | None = None) -> Tensor | None:
        """The weighted mean of the losses since the last step.

        A loss that is not finite has gradients that are not finite. If the gradients of the step
        are finite, the loop has left out the batch of such a loss by itself: the loss of the step
        is the last one.

        Args:
            norm: norm of the step's gradients, 0-d on the device of the losses, if it is known.

        Returns:
            0-d float32 tensor on the device of the losses, or None without losses. No sync.
        """
        if not self.count:
            return None
        mean = _quotient(self._total, self.weight)
        if self.count > 1 and norm is not None:
            mean = torch.where(mean.isfinite() | ~norm.isfinite(), mean, _quotient(*self._last))
        return mean

    def clear(self) -> None:
        """Drops the losses since the last step."""
        self.count = 0
        self.weight = 0.0


def _quotient(total: Tensor, weight: float) -> Tensor:
    """The total divided by the weight, with the same bits on every device."""
    if weight == 1.0:  # as usual
        return total
    # Not `total / weight`: on CUDA that is a multiplication by the reciprocal.
    return total / torch.full_like(total, weight)


class DroppedSteps:
    """Detects, without a sync, that a GradScaler skipped a step without calling the optimizer.

    After an overflow a GradScaler does not call `step()` of an optimizer that is not fused. But
    `update()` replaces the scaler's per-optimizer records. The old records show whether the loop
    asked the scaler to step this optimizer:

        asked, and `stepped`        a step like any other
        asked, and not `stepped`    the scaler has dropped the step
        not asked                   the loop did not want a step

    Args:
        scaler: the GradScaler of the loop, or None.
        optimizer: the optimizer whose steps are watched.
    """

    def __init__(self, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        self._scaler = scaler
        self._key = id(optimizer)
        self.stepped = False
        """Whether the optimizer has stepped since the last `update()`. The caller sets it."""
        self._records: Mapping[int, Mapping[str, Any]] = {}
        """The scaler's records since its last `update()`."""
        if scaler is not None:
            self._records = scaler._per_optimizer_states

    def take(self) -> bool:
        """Whether a step was dropped since the last call. Call it at least once per step."""
        if self._scaler is None or self._scaler._per_optimizer_states is self._records:
            return False
        # `update()` was called, so the old records are of the step before it.
        old = self._records.get(self._key)
        self._records = self._scaler._per_optimizer_states
        stepped = self.stepped
        self.stepped = False
        return not stepped and old is not None and old["stage"] is OptState.STEPPED


class Overflows:
    """Distinguishes a GradScaler's search for its scale from gradients that overflow at any scale.

    After an overflow a scaler skips the step and halves its scale, which is normal. After `search`
    consecutive overflows the gradients overflow at any scale, and the steps count as non-finite.
    The number of overflows stays on the device, so that nothing waits for it.

    Args:
        home: the device of the signals.
        search: overflows that a search may take.
    """

    def __init__(self, home: torch.device, search: int = MAX_OVERFLOWS) -> None:
        self._home = home
        self._search = search
        self._consecutive: Tensor | None = None
        """0-d int32, or None after a step without a scaler's flag."""

    def mark(self, signals: Signals, found_inf: Tensor | None) -> Signals:
        """Marks an overflow as externally skipped, or as non-finite after too many in a row.

        A step with a non-finite loss is non-finite too, because no scale makes the loss finite.

        Args:
            signals: the signals of the step, with a `grad_norm`.
            found_inf: a scaler's flag on `home`, 0-d float32, above 0 for an overflow; or None.

        Returns:
            The signals, in which an overflow is marked.
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
        assert signals.grad_norm is not None
        norm = signals.grad_norm.masked_fill(overflowed & ~skipped, math.nan)
        return signals._replace(externally_skipped=skipped, grad_norm=norm)


class Measurement(NamedTuple):
    """What this rank has measured of one step, not read on the host yet. Empty for a dropped step.

    The norms become the evidence of an alarm: which tensors had unusual gradients. For a step
    without an alarm nothing is read, so the norms are kept on the device. The tensors are small,
    and those of the last step without an alarm are kept for the comparison.
    """

    signals: Signals = Signals()
    """The signals of this rank."""
    params: Sequence[Tensor] = ()
    """The parameters with a gradient."""
    norms: Sequence[Tensor] = ()
    """Norm of this rank's part of each gradient, 0-d float32, with a GradScaler's scale."""
    divisor: Tensor | None = None
    """0-d float32: a GradScaler's scale that the gradients still contain, or None."""
    squares: Tensor | None = None
    """This rank's terms of the squared norms, (1,) float64, or (1 + n,) with norms of n tensors.
    None if every rank has all gradients."""
    clip_norm: Tensor | None = None
    """Norm of all gradients as `torch.nn.utils.clip_grad_norm_` computes it, without a GradScaler's
    scale. None unless the policy has a fixed clip, and torch could clip here."""
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
        values, divisor = to_host([stacked, self.divisor])
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
        if self.signals.loss is not None:
            loss = float(self.signals.loss)
        if not self.norms:
            return loss, math.nan
        norm = float(gradients.total_norm(self.norms, self.norms[0].device))
        if self.divisor is not None:
            norm /= float(self.divisor)
        return loss, norm


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
            norms, clip_norm = gradients.norms_of_clip(grads)
        if norms is None:
            norms = gradients.norms(grads)
            if grads:
                norm = gradients.total_norm(norms, self.home)
        else:
            # This norm is the norm of the step too: its dtype is wide enough for the policy.
            assert clip_norm is not None
            norm = gradients.to_device(clip_norm, self.home)
        group_norms: Tensor | None = None
        if self.engine.per_tensor or ranks.has_parts:
            norm_of = dict(zip(map(id, params), norms, strict=True))
            group_norms = gradients.norm_vector([norm_of.get(id(p)) for p in parameters], self.home)
        if divisor is not None:
            norm, clip_norm, group_norms = (
                # A scale is a power of two, so no bit is lost in a narrow dtype.
                None if each is None else (each / divisor).to(each.dtype)
                for each in (norm, clip_norm, group_norms)
            )
        squares: Tensor | None = None
        if group_norms is not None and ranks.has_parts:
            parts = ranks.squares(group_norms, parameters)
            squares = parts.sum().reshape(1)
            if self.engine.per_tensor:
                squares = torch.cat([squares, parts])
        if not self.engine.per_tensor:
            group_norms = None
        signals = self._signals(norm, group_norms, self.losses.mean(norm), self.eval_loss)
        return Measurement(signals, params, norms, divisor, squares, clip_norm)

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
        if norm is not signals.grad_norm:
            signals = signals._replace(grad_norm=norm)
        return signals, rates

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
