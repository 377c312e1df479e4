"""Skips a step of an optimizer that is not one of torch's own, by not running its `step()`.

torch's optimizers do nothing for a parameter without a gradient, so hiding the gradients is an
exact no-op for all of them. Third-party optimizers may count their steps in `param_groups` or in
attributes, average the weights every k-th step, draw random numbers, or raise when no parameter has
a gradient. That can be neither listed nor undone; so their `step()` is not run at all.

A hook cannot prevent `step()`. But the function that torch's hook wrapper calls lies in a closure
cell of the wrapper, one for each class; there it is replaced, once, by a function that checks for a
skip first. Optimizers that are not healed behave as before. Rejected: a `step` attribute on the
instance, as LR schedulers set one. Code that has stored `optimizer.step` earlier bypasses it: a
scheduler made before `attach`, accelerate's wrapper.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType
from typing import Any

from torch.optim import Optimizer

_NAME = "_healcore_step"
"""The optimizer's attribute that holds its `ThirdPartyStep`, only during a step that may be
skipped."""


class StepOmitted(BaseException):
    """Ends a `step()` from within its closure; caught where that `step()` was called.

    Not an Exception: an optimizer may catch those of a closure that has failed.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss


class ThirdPartyStep:
    """Controls whether the `step()` of one third-party optimizer runs."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.can_omit = is_third_party(optimizer) and _checks_for_skips(type(optimizer))
        """Whether `step()` can be prevented. If not, gradients are hidden instead."""
        self._omitted = self._running = False

    def watch(self, optimizer: Optimizer) -> None:
        """Before a step that is judged in its closure."""
        if self.can_omit:
            vars(optimizer)[_NAME] = self

    def omit(self, optimizer: Optimizer) -> None:
        """Skips this step; one that is running already goes on until StepOmitted."""
        if self.can_omit:
            vars(optimizer)[_NAME], self._omitted = self, True

    @property
    def can_end(self) -> bool:
        """In the closure: whether raising StepOmitted ends the step that `omit` was called for."""
        return self._omitted and self._running

    def reset(self, optimizer: Optimizer) -> None:
        """After the step; does nothing when there is none."""
        if self.can_omit:
            self._omitted = False
            vars(optimizer).pop(_NAME, None)

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the optimizer's class calls in place of its own `step()`."""
        if self._omitted:
            return None
        self._running = True
        try:
            return body(*args, **kwargs)
        except StepOmitted as end:
            return end.loss
        finally:
            self._running = False


def is_third_party(optimizer: Optimizer) -> bool:
    """Whether `step()` is not torch's: it may do anything, also without gradients."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def _checks_for_skips(kind: type[Optimizer]) -> bool:
    """Makes a class's `step()` check for a skip first, unless it does already.

    Returns:
        False where that is impossible: this torch or that class wraps `step()` in another way.
    """
    wrapper = kind.step
    cell = _cell(wrapper)
    if cell is None:
        return False
    body = cell.cell_contents
    if getattr(body, "__checks_healcore__", False):
        return True

    @functools.wraps(body)
    def step(*args: Any, **kwargs: Any) -> Any:
        control = getattr(args[0], _NAME, None)
        # A subclass that calls super().step() comes here twice: the outer call decides.
        if control is None or type(args[0]).step is not wrapper:
            return body(*args, **kwargs)
        return control.run(body, args, kwargs)

    step.__checks_healcore__ = True  # type: ignore[attr-defined]
    cell.cell_contents = step
    return True


def _cell(wrapper: Any) -> CellType | None:
    """The cell in which `Optimizer.profile_hook_step` keeps the function that it calls."""
    code = Optimizer.profile_hook_step(_cell).__code__
    if getattr(wrapper, "__code__", None) is not code or "func" not in code.co_freevars:
        return None
    return wrapper.__closure__[code.co_freevars.index("func")]
