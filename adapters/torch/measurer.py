"""Measures one step: gradient norms, the losses observed since the last step, side signals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.torch import norms
from healcore.torch.grad_scaler import DroppedSteps, Overflows
from healcore.torch.losses import LossMean, checked
from healcore.torch.measurement import Measurement

_SIDE_SIGNALS = {"eval_loss": float("nan"), "update_norm": None}
"""Signals that not every step has, and what replaces them at a step without one (None: absent)."""


class Measurer:
    """Collects what the loop reports, and measures the gradients that the optimizer holds.

    Args:
        engine: the policy's engine; says which signals are needed.
        optimizer: the optimizer.
        home: the first parameter's device; all signals end up there.
        scaler: the GradScaler, or None.
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
        self.seen: set[str] = set()
        """Names of the signals that any step had so far."""
        self.tensor_norms: Sequence[Tensor] = ()
        """Norm of each gradient at the last step, 0-d float32, on the gradient's device."""
        self._window = LossMean(home)
        self._dropped = DroppedSteps(scaler, optimizer)
        self._overflows = Overflows(home)
        self._side_signals: dict[str, Tensor | float] = {}

    def add_loss(self, loss: Tensor | float, name: str = "loss") -> None:
        """Adds one micro-batch's loss; SignalError, and no change, if it is not a number."""
        self._window.add(checked(name, loss))

    def add_side_signal(self, name: str, value: Tensor | float) -> None:
        """Sets a side signal for the next step; SignalError if it is not a number."""
        self._side_signals[name] = checked(name, value)

    @property
    def has_loss(self) -> bool:
        """Whether a loss was observed since the last step."""
        return len(self._window) > 0

    def clear(self) -> None:
        """Drops what was reported since the last step."""
        self._window.clear()
        self._side_signals.clear()

    def measure(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        *,
        grad_divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> Measurement:
        """Measures the step about to be taken.

        Args:
            optimizer: the optimizer.
            everything: all its parameters.
            grad_divisor: a GradScaler's scale, if the gradients still carry it.
            found_inf: a GradScaler's overflow flag.
        """
        self._dropped.stepped = True
        self._overflows.reset()
        each = norms.per_tensor([p.grad for p in everything if p.grad is not None])
        self.tensor_norms = each
        group_norms = None
        if self.engine.per_tensor:
            remaining = iter(each)
            group_norms = norms.vector(
                [None if p.grad is None else next(remaining) for p in everything], self.home
            )
        measured = Measurement(
            grad_norm=norms.total(each, self.home) if each else None,
            loss=self._window.mean(),
            group_norms=group_norms,
            eval_loss=self._side_signal("eval_loss"),
            update_norm=self._side_signal("update_norm"),
            grad_divisor=self._at_home(grad_divisor),
            found_inf=self._at_home(found_inf),
            learning_rate=self._learning_rate(optimizer),
            state_init=is_state_init(optimizer),
        )
        if measured.loss is not None:
            self.seen.add("loss")
        self.seen.update(self._side_signals)
        return measured

    def mark_overflow(self, measured: Measurement) -> Measurement:
        """Marks an overflow: externally skipped, or non-finite after too many in a row."""
        if measured.found_inf is None or measured.grad_norm is None:
            return measured
        skipped = self._overflows.externally_skipped(measured.found_inf)
        counted = (measured.found_inf > 0) & ~skipped
        return measured._replace(
            externally_skipped=skipped,
            grad_norm=measured.grad_norm.masked_fill(counted, math.nan),
        )

    def measure_dropped(
        self, optimizer: Optimizer, groups: int, *, alone: bool
    ) -> Measurement | None:
        """A step that a GradScaler skipped without calling the optimizer, if it is to be judged.

        Its losses are dropped in any case. Reads nothing on the host.

        Args:
            optimizer: the optimizer.
            groups: number of its parameters.
            alone: no other rank has to judge it by the same loss.
        """
        if not self._dropped.found():
            return None
        loss = self._window.mean() if alone else None
        measured = None
        if self._overflows.count_dropped():
            bad = torch.full((), math.nan, dtype=torch.float32, device=self.home)
            measured = Measurement(
                grad_norm=bad,
                loss=None if loss is None else loss.clone(),
                group_norms=bad.expand(groups).clone() if self.engine.per_tensor else None,
                eval_loss=self._side_signal("eval_loss"),
                update_norm=self._side_signal("update_norm"),
                learning_rate=self._learning_rate(optimizer),
            )
        self.clear()
        return measured

    def all_finite(self, grads: Sequence[Tensor]) -> bool:
        """Whether these gradients are finite. A sync on an accelerator."""
        norm = norms.total(norms.per_tensor(grads), self.home)
        return bool(torch.isfinite(norm).cpu().numpy())

    def _side_signal(self, name: str) -> Tensor | None:
        """A side signal as a tensor, if the policy reads it."""
        value = self._side_signals.get(name, _SIDE_SIGNALS[name])
        if value is None or name not in self.engine.needs:
            return None
        if isinstance(value, Tensor):
            return value.to(self.home, torch.float32, non_blocking=True)
        return torch.full((), value, dtype=torch.float32, device=self.home)

    def _learning_rate(self, optimizer: Optimizer) -> Tensor | None:
        """The schedule's rate, where the policy may limit it in absolute terms."""
        rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
        if not rates or not self.engine.limits_lr:
            return None
        if not any(isinstance(rate, Tensor) for rate in rates):
            return torch.full((), max(rates), dtype=torch.float32, device=self.home)
        # Stays on the device: reading it would be a sync.
        each = [torch.as_tensor(r, dtype=torch.float32).detach().to(self.home) for r in rates]
        return torch.stack([rate.reshape(()) for rate in each]).amax()

    def _at_home(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return value.detach().to(self.home, torch.float32, non_blocking=True)


def is_state_init(optimizer: Optimizer) -> bool:
    """Whether this may be the step by which torch.distributed.checkpoint creates optimizer state.

    It steps an optimizer without state, at learning rate 0, on zero gradients. (A schedule that
    warms up from 0 has real gradients: the engines look at the norm too.)
    """
    if optimizer.state:
        return False
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if isinstance(lr, Tensor):
            if lr.device.type != "cpu":
                return False
            lr = float(lr.detach().numpy())
        if lr != 0:
            return False
    return True
