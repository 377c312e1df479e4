"""Measuring one step: gradient norms, the losses reported since the last one, side signals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.torch import norms
from healcore.torch.amp import DroppedSteps, Overflows
from healcore.torch.losses import LossWindow, checked
from healcore.torch.measurement import Measurement

_BESIDE = {"eval_loss": float("nan"), "update_norm": None}
"""Side signals, and what stands for them at a step without one (None: absent)."""


class Measurer:
    """Collects what the loop reports and measures what the optimizer holds.

    Args:
        engine: the policy's engine; says which signals are wanted.
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
        self.tensor_norms: Sequence[Tensor] = ()
        """Norm of each gradient there was at the last step, 0-d float32, where the gradient is."""
        self._window = LossWindow(home)
        self._dropped = DroppedSteps(scaler, optimizer)
        self._overflows = Overflows(home)
        self._beside: dict[str, Tensor | float] = {}

    def add_loss(self, loss: Tensor | float, name: str = "loss") -> None:
        """Takes one micro-batch's loss; SignalError, and no change, if it is none."""
        self._window.add(checked(name, loss))

    def add_beside(self, name: str, value: Tensor | float) -> None:
        """Takes a side signal for the next step; SignalError if it is not a number."""
        self._beside[name] = checked(name, value)

    @property
    def has_loss(self) -> bool:
        """Whether a loss was reported since the last step."""
        return len(self._window) > 0

    def clear(self) -> None:
        """Ends the window: whatever was reported belongs to the step that is over."""
        self._window.clear()
        self._beside.clear()

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
        self._overflows.end_row()
        each = norms.per_tensor([p.grad for p in everything if p.grad is not None])
        self.tensor_norms = each
        group_norms = None
        if self.engine.per_tensor:
            given = iter(each)
            group_norms = norms.vector(
                [None if p.grad is None else next(given) for p in everything], self.home
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
            rehearsal=is_rehearsal(optimizer),
        )
        if measured.loss is not None:
            self.seen.add("loss")
        self.seen.update(self._beside)
        return measured

    def void_overflow(self, seen: Measurement) -> Measurement:
        """The step, void where a GradScaler drops it for good reason, non-finite where for none."""
        if seen.found_inf is None or seen.grad_norm is None:
            return seen
        void = self._overflows.void(seen.found_inf)
        counted = (seen.found_inf > 0) & ~void
        return seen._replace(void=void, grad_norm=seen.grad_norm.masked_fill(counted, math.nan))

    def dropped(self, optimizer: Optimizer, groups: int, *, alone: bool) -> Measurement | None:
        """A step that a GradScaler has dropped without the optimizer, if it has to be counted.

        Its losses are gone either way. Reads nothing.

        Args:
            optimizer: the optimizer.
            groups: number of its parameters.
            alone: no other rank has to judge it by the same loss.
        """
        if not self._dropped.found():
            return None
        loss = self._window.mean() if alone else None
        seen = None
        if self._overflows.drop():
            bad = torch.full((), math.nan, dtype=torch.float32, device=self.home)
            seen = Measurement(
                grad_norm=bad,
                loss=None if loss is None else loss.clone(),
                group_norms=bad.expand(groups).clone() if self.engine.per_tensor else None,
                eval_loss=self._side_signal("eval_loss"),
                update_norm=self._side_signal("update_norm"),
                learning_rate=self._learning_rate(optimizer),
            )
        self.clear()
        return seen

    def all_finite(self, grads: Sequence[Tensor]) -> bool:
        """Whether these gradients are finite. A sync on an accelerator."""
        norm = norms.total(norms.per_tensor(grads), self.home)
        return bool(torch.isfinite(norm).cpu().numpy())

    def _side_signal(self, name: str) -> Tensor | None:
        """A side signal as a tensor, if the policy reads it at all."""
        value = self._beside.get(name, _BESIDE[name])
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


def is_rehearsal(optimizer: Optimizer) -> bool:
    """Whether this looks like torch.distributed.checkpoint making a fresh optimizer's state.

    It steps an optimizer without state, at learning rate 0, on zero gradients. (A schedule that
    warms up from 0 has real gradients: the seats look at the norm too.)
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
