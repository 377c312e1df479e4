"""Detects `observe` after the step: each loss would be judged with the next step's gradients.

Later in a run a correct and a late loop look the same: both repeat step, observe, backward. They
differ at the beginning: the first step of a late loop has no loss, and the backward pass of its
first loss is over before that loss is observed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from healcore.torch.errors import ObservedTooLateError

_log = logging.getLogger("healcore")


class LateLoss:
    """Checks the first loss of a run, and only if exactly one step came before it."""

    def __init__(self) -> None:
        self._steps: float = 0
        self._grad: tuple[Tensor, Tensor, int] | None = None
        self._hook: Any = None
        self._reached = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to check."""
        return self._steps > 1 and self._hook is None

    def before_step(self, params: Sequence[Tensor], has_loss: bool) -> None:
        """Call it when a step is about to be judged.

        Args:
            params: those with a gradient.
            has_loss: a loss was observed for it.

        Raises:
            ObservedTooLateError: it belongs to the step before.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            if not self._reached:
                raise ObservedTooLateError(
                    "the loss was observed after the step that it belongs to: its backward pass "
                    "was over before, and every step would be judged by the loss of the step "
                    "before; call observe(loss) before optimizer.step()"
                )
        self._steps = math.inf if has_loss else self._steps + 1
        self._grad = None
        if self._steps == 1:
            p = params[0]
            assert p.grad is not None
            self._grad = p, p.grad, p.grad._version

    def observed(self, loss: Any) -> None:
        """Call it when a loss is observed."""
        if self._steps != 1:
            return
        self._steps = math.inf
        (p, grad, version), self._grad = self._grad or (None, None, 0), None
        if p is None or grad is None or (p.grad is not None and p.grad is not grad):
            return  # another backward pass has run since
        if grad._version != version:
            return
        if isinstance(loss, Tensor) and loss.requires_grad:
            self._hook = loss.register_hook(self._backward)
        else:
            _log.warning(
                "the first loss was observed after the first step: if it belongs to that step, "
                "all losses come one step late; call observe(loss) before optimizer.step()"
            )

    def _backward(self, _: Tensor) -> None:
        self._reached = True
