"""Leaving out a step of an optimizer that is not one of torch's own.

torch's optimizers do nothing for a parameter without a gradient, and hiding the gradients is an
exact no-op of all of them. Others count their steps in `param_groups` or in attributes, average
the weights every k-th step, draw random numbers, or raise when no parameter has a gradient. What
they would do can be neither listed nor taken back; so their `step()` is not run at all.

A hook cannot arrange that. The function that torch's hook wrapper calls lies in a closure cell of
the wrapper, one for each class; a function that asks first is put in front of it, once. It changes
nothing for optimizers that are not healed. Rejected: a `step` on the instance, as LR schedulers
put one there. Whoever has taken hold of `optimizer.step` before passes it by: a scheduler made
before `attach`, accelerate's wrapper.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType
from typing import Any

from torch.optim import Optimizer

_NAME = "_healcore_step"
"""Where an `OwnStep` lies on its optimizer, only in a step that may be left out."""


class LeftOut(BaseException):
    """Ends a `step()` from within its closure; caught where that `step()` was called.

    Not an Exception: an optimizer may catch those of a closure that has failed.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss


class OwnStep:
    """The `step()` of one optimizer that is not torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.stoppable = is_foreign(optimizer) and _asks_first(type(optimizer))
        """Whether it can be left out. If not, hidden gradients have to do."""
        self._left_out = self._running = False

    def watch(self, optimizer: Optimizer) -> None:
        """Before a step that is judged in its closure."""
        if self.stoppable:
            vars(optimizer)[_NAME] = self

    def leave_out(self, optimizer: Optimizer) -> None:
        """Decides that this step is left out; one that runs already goes on until LeftOut."""
        if self.stoppable:
            vars(optimizer)[_NAME], self._left_out = self, True

    @property
    def can_end(self) -> bool:
        """In the closure: whether raising LeftOut ends the step that `leave_out` was called for."""
        return self._left_out and self._running

    def close(self, optimizer: Optimizer) -> None:
        """After the step; harmless when there is none."""
        if self.stoppable:
            self._left_out = False
            vars(optimizer).pop(_NAME, None)

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the optimizer's class calls in place of its own `step()`."""
        if self._left_out:
            return None
        self._running = True
        try:
            return body(*args, **kwargs)
        except LeftOut as end:
            return end.loss
        finally:
            self._running = False


def is_foreign(optimizer: Optimizer) -> bool:
    """Whether `step()` is not torch's: it may do anything, also without gradients."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def _asks_first(kind: type[Optimizer]) -> bool:
    """Puts the question in front of a class's `step()`, unless it is there.

    Returns:
        False where there is no place for it: this torch or that class wraps in another way.
    """
    wrapper = kind.step
    cell = _cell(wrapper)
    if cell is None:
        return False
    body = cell.cell_contents
    if getattr(body, "__asks_healcore__", False):
        return True

    @functools.wraps(body)
    def step(*args: Any, **kwargs: Any) -> Any:
        own = getattr(args[0], _NAME, None)
        # Of a subclass that calls super().step(), both come by here: the outer one decides.
        if own is None or type(args[0]).step is not wrapper:
            return body(*args, **kwargs)
        return own.run(body, args, kwargs)

    step.__asks_healcore__ = True  # type: ignore[attr-defined]
    cell.cell_contents = step
    return True


def _cell(wrapper: Any) -> CellType | None:
    """Where a wrapper made by `Optimizer.profile_hook_step` keeps the function that it calls."""
    code = Optimizer.profile_hook_step(_cell).__code__
    if getattr(wrapper, "__code__", None) is not code or "func" not in code.co_freevars:
        return None
    return wrapper.__closure__[code.co_freevars.index("func")]
