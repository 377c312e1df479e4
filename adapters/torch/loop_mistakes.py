"""Detects mistakes of a training loop, without a host sync in a correct loop."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from healcore import console
from healcore.torch.errors import ObservedTooLateError
from healcore.torch.gradients import is_dtensor, parameters

if TYPE_CHECKING:
    from healcore.torch.healing import Healing

HITS = 20
"""Steps at one maximum norm after which this norm counts as another code's limit."""
_SAME = 2e-4
"""Relative tolerance of equal norms: clipping rounds gradients and divides by the norm + 1e-6."""
_VALUES = 3
"""Distinct norms required within the tolerance: a constant gradient repeats one norm exactly."""


class NormCeiling:
    """Detects that other code clips the gradients before the policy sees them.

    `clip_grad_norm_(..., 1.0)`, or a trainer's own clipping, turns every larger norm into 1.0. The
    policy would then see neither a spike nor the growth before a spike.
    """

    def __init__(self) -> None:
        self._highest = 0.0
        self._hits = 0
        self._values: set[float] = set()
        self._has_warned = False

    def add(self, norm: float) -> str | None:
        """Adds one step's norm. Returns a warning at the step that proves the limit, else None."""
        if self._has_warned or not 0.0 < norm < math.inf:
            return None
        if norm > self._highest * (1 + _SAME):
            self._highest, self._hits, self._values = norm, 0, set()
        if norm < self._highest * (1 - _SAME):
            return None
        self._hits += 1
        if len(self._values) < _VALUES:
            self._values.add(norm)
        if self._hits < HITS or len(self._values) < _VALUES:
            return None
        self._has_warned = True
        return (
            f"the gradient norm was {self._highest:.4g} at {HITS} steps and never above: other "
            "code clips before the policy, which hides spikes; remove clip_grad_norm_ from the "
            "loop, or the trainer's own clipping (max_grad_norm, gradient_clip_val, "
            "gradient_clipping), and set the limit in the policy: clip={'max_norm': ...}"
        )


class LateLoss:
    """Detects `observe` after the step: each loss would be judged with the next step's gradients.

    From the second step on, a correct and a late loop look the same: step, observe, backward. But a
    late loop has no loss at its first step, and observes its first loss after that loss's backward
    pass. So the first loss is checked, if exactly one step came before it.
    """

    def __init__(self) -> None:
        self._steps: float = 0
        self._grad: tuple[Tensor, Tensor, int] | None = None
        self._hook: Any = None
        self._reached = False

    @property
    def is_done(self) -> bool:
        """Whether the check has ended."""
        return self._steps > 1 and self._hook is None

    def before_step(self, params: Sequence[Tensor], has_loss: bool) -> None:
        """Call it before a step is judged, with the parameters that have a gradient.

        Raises:
            ObservedTooLateError: the loss of this step belongs to the previous step.
        """
        if self._hook is not None:
            self.cancel()
            if not self._reached:
                raise ObservedTooLateError(
                    "the loss was observed after its own step: its backward pass had already run, "
                    "and every step would be judged by the loss of the previous step; call "
                    "observe(loss) before optimizer.step()"
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
        first, self._grad = self._grad, None
        if first is None:
            return
        p, grad, version = first
        if (p.grad is not None and p.grad is not grad) or grad._version != version:
            return  # another backward pass has run since the first step
        if isinstance(loss, Tensor) and loss.requires_grad:
            self._hook = loss.register_hook(self._backward)
        else:
            console.warning(
                "the first loss was observed after the first step: if it belongs to that step, "
                "all losses come one step late; call observe(loss) before optimizer.step()"
            )

    def cancel(self) -> None:
        """Ends the check, because the first loss's backward pass was abandoned and is repeated."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _backward(self, _: Tensor) -> None:
        self._reached = True


_UNCLEARED = 5
"""Consecutive steps without cleared gradients after which the mistake is reported."""
NOT_CLEARED = (
    f"{_UNCLEARED} steps have also used the gradients of all earlier steps: call "
    "optimizer.zero_grad() once for each step, after optimizer.step() or before the backward pass"
)


class ClearedGradients:
    """Detects a loop that never clears its gradients, by watching one parameter.

    Every write to a tensor increments its version. If the gradient has one version after a step and
    at the next backward pass, nothing has cleared it. The first cleared gradient ends the watch, so
    a correct loop pays nothing from its second step on.
    """

    def __init__(self) -> None:
        self._param: Tensor | None = None
        self._grad: Tensor | None = None
        self._version = 0
        self._hook: Any = None
        self._reached = self._is_closed = False
        self._steps = 0

    def before_step(self, optimizer: Optimizer) -> bool:
        """Call it before each step. Returns True once, at the step that proves the mistake."""
        if self._is_closed:
            return False
        self._steps += self._reached
        certain = self._steps == _UNCLEARED
        if certain:
            self.close()
        elif self._hook is None:
            self._watch(parameters(optimizer))
        return certain

    def after_step(self) -> None:
        """Call it after each step."""
        self._grad = None if self._param is None else self._param.grad
        self._version = 0 if self._grad is None else self._grad._version
        self._reached = False

    def close(self) -> None:
        """Ends the watch."""
        if self._hook is not None:
            self._hook.remove()
        self._param = self._grad = self._hook = None
        self._is_closed = True

    def _watch(self, params: Sequence[Tensor]) -> None:
        found = next((p for p in params if p.requires_grad and p.is_leaf), None)
        if is_dtensor(found):
            self.close()
        elif found is not None:
            hook: Any = torch.compiler.disable(self._before_accumulation)
            self._param, self._hook = found, found.register_hook(hook)

    def _before_accumulation(self, _: Tensor) -> None:
        """Runs before a backward pass adds to the gradient, which increments the version."""
        grad = None if self._param is None else self._param.grad
        if grad is None or grad is not self._grad or grad._version != self._version:
            self.close()
        elif self._steps == _UNCLEARED - 1 and not bool(grad.any().cpu().numpy()):
            self.close()  # `grad.data.zero_()` keeps the version; a sync in wrong loops only
        else:
            self._version += 1
            self._reached = True


class UntrackedOptimizers:
    """Warns about an optimizer that steps healed parameters but is not in the Healer's state.

    After `optimizer = AdamW(...)` in the middle of a run no step is judged or rolled back. The old
    optimizer's hooks no longer run, but torch's global step hook runs for every optimizer.
    """

    _MOST = 10
    """Maximum number of warnings: a loop may create a new optimizer for every epoch."""

    def __init__(
        self,
        state: Mapping[str, Any],
        healings: Mapping[str, Healing],
        warn: Callable[[str], object],
    ) -> None:
        self._state = state
        self._healings = healings
        self._warn = warn
        self._checked = weakref.WeakSet(healing.optimizer for healing in healings.values())
        self._warnings = 0
        weak_self = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watcher = weak_self()
            if watcher is not None:
                watcher._check(optimizer)

        # Weak, because torch's registry must not keep an unused driver alive.
        hook: Any = torch.compiler.disable(stepped)
        handle = register_optimizer_step_post_hook(hook)
        self.close = weakref.finalize(self, handle.remove)
        """Stops watching. Calling it again does nothing."""

    def _check(self, optimizer: Optimizer) -> None:
        if optimizer in self._checked:
            return
        if any(healing.in_step for healing in self._healings.values()):
            return  # an optimizer of the state wraps or shards this optimizer
        self._checked.add(optimizer)
        owners = self._owners(optimizer)
        if not owners or self._warnings == self._MOST:
            return
        self._warnings += 1
        self._warn(
            f"an optimizer ({type(optimizer).__name__}) that is not in the state trains parameters "
            f"of {owners}: its steps are neither judged nor healed, nor is it saved; put it in the "
            "state, or change the param_groups of the optimizer there instead of creating another"
        )

    def _owners(self, optimizer: Optimizer) -> str:
        """Names of the items in the state that have a parameter of this optimizer."""
        params = {*map(id, parameters(optimizer))}
        owned = {n: m.parameters() for n, m in self._state.items() if isinstance(m, nn.Module)}
        trained = {n: parameters(h.optimizer) for n, h in self._healings.items()}
        for items in (owned, trained):
            found = [f'"{n}"' for n, each in items.items() if any(id(p) in params for p in each)]
            if found:
                return ", ".join(found)
        return ""
