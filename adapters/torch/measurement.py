"""Measures the signals of one step next to the parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
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

    The loop reports losses and evaluations whenever it has them. `measure`, at the start of
    `optimizer.step()`, measures the gradients and makes one `Signals` of everything:

        observe, eval_loss ───────────┐
        p.grad of each parameter ─────┼─► measure ─► Signals
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
        # Of all parameters, because the last group may be empty.
        self._last_parameter = gradients.parameters(optimizer)[-1]
        self._grad_at_loss: weakref.ref[Tensor] | None = None
        """Gradient of `_last_parameter` when the last loss was observed, or None without one."""
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

        Args:
            modules: the modules of the run. Parameters that are in none of them come last.
        """
        self._modules = modules
        self._clip_order = []

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
    ) -> Signals:
        """Measures the current step of this rank. Without gradients `grad_norm` is None.

        Args:
            parameters: all parameters of the optimizer; without a gradient the group norm is 0.
            divisor: a GradScaler's scale that the gradients still contain, or None.
            ranks: the ranks that step together.

        Returns:
            The signals of this rank. `norms`, `squares` and `clip_norm` are set too.
        """
        self.dropped.stepped = True
        gradients.complete_(parameters)
        grads: list[Tensor] = []
        for p in parameters:
            grad = p.grad
            if grad is not None:
                grads.append(grad)
        norm: Tensor | None = None
        self.clip_norm = None
        if self._live.max_norm is not None and self.may_clip_as_torch and not ranks.has_parts:
            norm = self._measure_as_clip(parameters, grads)
        if norm is None:
            self.norms = gradients.norms(grads)
            if grads:
                norm = gradients.total_norm(self.norms, self.home)
        group_norms: Tensor | None = None
        self.squares = None
        if self.engine.per_tensor or ranks.has_parts:
            remaining = iter(self.norms)
            norm_of_each: list[Tensor | None] = []
            for p in parameters:
                if p.grad is None:
                    norm_of_each.append(None)
                else:
                    norm_of_each.append(next(remaining))
            group_norms = gradients.norm_vector(norm_of_each, self.home)
        if divisor is not None:
            if norm is not None:
                norm = norm / divisor
            if self.clip_norm is not None:  # the scale is a power of two, so no bit is lost
                self.clip_norm = (self.clip_norm / divisor).to(self.clip_norm.dtype)
            if group_norms is not None:
                group_norms = group_norms / divisor
        if group_norms is not None and ranks.has_parts:
            parts = ranks.squares(group_norms, parameters)
            self.squares = parts.sum().reshape(1)
            if self.engine.per_tensor:
                self.squares = torch.cat([self.squares, parts])
        if not self.engine.per_tensor:
            group_norms = None
        loss = self.losses.mean()
        if loss is not None and self.losses.count > 1:
            before = None
            if self._grad_at_loss is not None:
                before = self._grad_at_loss()
            # Backward passes add to a gradient in place. Another tensor means that the gradients
            # are of the last loss only: the loop has left out earlier batches.
            if self._last_parameter.grad is not before:
                loss = torch.where(loss.isfinite(), loss, self.losses.last())
        return self._signals(norm, group_norms, loss)

    def clip_factor(self, grad_scale: float | Tensor) -> Tensor | None:
        """The factor of `torch.nn.utils.clip_grad_norm_`, or None if `clip_norm` is None.

        Args:
            grad_scale: the engine's factor. It replaces torch's where torch's norm overflows: a
                norm of float16 gradients is infinite above 65,504, and torch would clip to 0.

        Returns:
            The factor, 0-d in the dtype of `clip_norm` and on its device, at most 1.
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
        if not grads:
            return None
        measured = self._norms_of_clip(parameters, grads)
        if measured is None:
            return None
        norms, total = measured
        self.clip_norm = total
        if norms is None:
            return None
        self.norms = norms
        return gradients.moved(total, self.home)

    def _norms_of_clip(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor] | None, Tensor] | None:
        """`gradients.norms_of_clip`, summed in the modules' order.

        The norms of each gradient are returned in the optimizer's order.
        """
        if len(self._clip_order) != len(parameters):
            self._find_clip_order(parameters)
        if not self._is_reordered:
            return gradients.norms_of_clip(grads)
        present: list[int] = []
        reordered: list[Tensor] = []
        for i in self._clip_order:
            grad = parameters[i].grad
            if grad is not None:
                present.append(i)
                reordered.append(grad)
        measured = gradients.norms_of_clip(reordered)
        if measured is None or measured[0] is None:
            return measured
        norm_at = dict(zip(present, measured[0], strict=True))
        return [norm_at[i] for i in sorted(present)], measured[1]

    def _find_clip_order(self, parameters: Sequence[Tensor]) -> None:
        """Sets `_clip_order` and `_is_reordered`."""
        places: dict[int, int] = {}
        visited = 0
        for module in self._modules:
            for p in module.parameters():
                places[id(p)] = visited  # a module that comes later decides for a shared parameter
                visited += 1
        outside = len(places)
        # The sort is stable, so parameters outside of the modules keep the optimizer's order.
        positions = range(len(parameters))
        self._clip_order = sorted(positions, key=lambda i: places.get(id(parameters[i]), outside))
        self._is_reordered = self._clip_order != [*positions]

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
        bad: list[float] = []
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and not rate.is_cpu:
                is_finite = self._at_home(rate).reshape(()).isfinite()
                norm = torch.where(is_finite, signals.grad_norm, math.nan)
                signals = signals._replace(grad_norm=norm)
            elif rate is None or abs(rate) <= FLOAT32_MAX:
                continue
            elif any(p.grad is not None for p in group["params"]):
                bad.append(float(rate))
        if bad:
            norm = torch.full_like(signals.grad_norm, math.nan)
            signals = signals._replace(grad_norm=norm)
        return signals, tuple(bad)

    def measure_dropped(self, groups: int, *, alone: bool) -> Signals:
        """Measures a step that a GradScaler has dropped, see `DroppedSteps`.

        Its gradients have overflowed, so their norms are NaN. The evaluation is kept for the next
        step, which has a loss on several ranks too.

        Args:
            groups: number of parameters.
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
            group_norms = bad.expand(groups).clone()
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
        if self.losses.weight > 0:
            self.has_seen_loss = True
        eval_loss = None
        if "eval_loss" in self.engine.needs:
            eval_loss = self._at_home(self.eval_loss)
        learning_rate = None
        if self._live.stepping.limits_lr:
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
        if isinstance(value, Tensor):
            return gradients.moved(value, self.home, torch.float32)
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


class LossMean:
    """Weighted mean of the losses since the last step, on the parameters' device, without a sync.

    No sum shares memory with a loss, because a loop may change the loss in place after `observe`
    (``loss /= steps``).

    Args:
        device: the parameters' device.

    Attributes:
        count: number of losses since the last step.
        weight: sum of their weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self.clear()

    def add(self, loss: Tensor | float, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss. No host sync.

        Args:
            loss: what `one_number` has returned for the loss.
            weight: its weight in the mean, above 0.
        """
        is_usual = weight == 1.0 and self._is_on_cpu
        if is_usual and type(loss) is Tensor and loss.is_cpu and loss.dtype is torch.float32:
            value = loss.clone()  # as in most small models; saves half of the time
        elif isinstance(loss, Tensor) and not loss.is_cpu:
            value = gradients.moved(loss, self._device, torch.float32) * weight
        else:
            # As a number, because copying pageable memory to an accelerator is a sync. As a double,
            # because NumPy lacks some dtypes of torch.
            if isinstance(loss, Tensor):
                loss = float(loss.double().numpy())
            number = float(loss) * weight
            if abs(number) > FLOAT32_MAX:
                number *= math.inf  # `full` would raise, but any other cast gives infinity
            value = torch.full((), number, dtype=torch.float32, device=self._device)
        if self.count:
            self._total = self._total + value
        else:
            self._total = value
        self._last = value
        self._last_weight = weight
        self.count += 1
        self.weight += weight

    def mean(self) -> Tensor | None:
        """The weighted mean of the losses since the last step.

        Returns:
            0-d float32 tensor on the device of the losses, or None without losses. No sync.
        """
        if not self.count:
            return None
        return _quotient(self._total, self.weight)

    def last(self) -> Tensor:
        """The last loss without its weight, 0-d float32. There must be a loss."""
        return _quotient(self._last, self._last_weight)

    def clear(self) -> None:
        """Drops the losses since the last step."""
        self.count = 0
        self.weight = 0.0


def _quotient(total: Tensor, weight: float) -> Tensor:
    # Not `total / weight`: on CUDA that is a multiplication by the reciprocal.
    if weight == 1.0:
        return total
    return total / torch.full_like(total, weight)


# -- steps that a GradScaler skips ----------------------------------------------------------------


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
        self._records: Mapping[int, Mapping[str, Any]] | None = None
        """The scaler's records since its last `update()`."""
        if scaler is not None:
            self._records = scaler._per_optimizer_states

    def take(self) -> bool:
        """Whether a step was dropped since the last call. Call it at least once per step."""
        if self._scaler is None or self._scaler._per_optimizer_states is self._records:
            return False
        # `update()` was called, so the old records are of the step before it.
        old = self._records
        self._records = self._scaler._per_optimizer_states
        stepped = self.stepped
        self.stepped = False
        if stepped or old is None or self._key not in old:
            return False
        return old[self._key]["stage"] is OptState.STEPPED


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
        norm = signals.grad_norm.masked_fill(overflowed & ~skipped, math.nan)
        return signals._replace(externally_skipped=skipped, grad_norm=norm)
