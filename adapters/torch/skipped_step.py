"""Skips a step exactly in the two cases in which it is not enough to hide the gradients.

Without gradients the step of one of torch's own optimizers is an exact no-op. The two cases are:

- A third-party optimizer may count its steps, average the weights, draw random numbers, or raise
  without gradients. None of this can be undone, so its `step()` is not run (`StepSkipper`).
- A step with a closure is judged after the first evaluation. Some optimizers have already made
  changes by this point. `ClosureUndo` undoes the changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from healcore.torch import gradients

_NAME = "_healcore_step"
"""Attribute that holds an optimizer's `StepSkipper` during a step that may be skipped."""


class StepSkipped(BaseException):
    """Ends a `step()` from its closure. A BaseException: optimizers may catch Exceptions."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss


class StepSkipper:
    """Controls whether the `step()` of one third-party optimizer runs.

    A hook cannot prevent `step()`. But torch wraps the `step` of each class once, and keeps the
    wrapped function in a closure cell. `_install_skip_check` puts a function into the cell that
    checks for a skip first. Rejected: a `step` attribute on the instance, as LR schedulers set. A
    scheduler or accelerate's wrapper that stored `optimizer.step` before `attach` bypasses it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.can_skip = is_third_party(optimizer) and _install_skip_check(type(optimizer))
        """Whether `step()` can be prevented. If not, gradients are hidden instead."""
        self._skipped = self._running = False

    def watch(self) -> None:
        """Call it before a step that is judged in its closure."""
        if self.can_skip:
            vars(self._optimizer)[_NAME] = self

    def skip(self) -> None:
        """Skips this step. A running step continues until StepSkipped is raised."""
        if self.can_skip:
            vars(self._optimizer)[_NAME], self._skipped = self, True

    @property
    def can_end(self) -> bool:
        """Whether raising StepSkipped in the closure ends the step that `skip` was called for."""
        return self._skipped and self._running

    def reset(self) -> None:
        """Call it after the step. Does nothing if there was no step."""
        if self.can_skip:
            self._skipped = False
            vars(self._optimizer).pop(_NAME, None)

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `body`, the class's original `step`, unless the step is skipped."""
        if self._skipped:
            return None
        self._running = True
        try:
            return body(*args, **kwargs)
        except StepSkipped as end:
            return end.loss
        finally:
            self._running = False


def is_third_party(optimizer: Optimizer) -> bool:
    """Whether `step()` is defined outside of torch.optim, so that it may act without gradients."""
    return not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")


def _install_skip_check(kind: type[Optimizer]) -> bool:
    """Makes a class's `step()` check for a skip. False if `step` is wrapped in an unknown way."""
    wrapper = kind.step
    cell = _cell(wrapper)
    if cell is None:
        return False
    body = cell.cell_contents
    if getattr(body, "__checks_healcore__", False):
        return True

    @functools.wraps(body)
    def step(*args: Any, **kwargs: Any) -> Any:
        skipper = getattr(args[0], _NAME, None)
        # If a subclass calls super().step(), this runs twice: the outer call decides.
        if skipper is None or type(args[0]).step is not wrapper:
            return body(*args, **kwargs)
        return skipper.run(body, args, kwargs)

    step.__checks_healcore__ = True  # type: ignore[attr-defined]
    cell.cell_contents = step
    return True


def _cell(wrapper: Any) -> CellType | None:
    """The cell in which `Optimizer.profile_hook_step` keeps the function that it calls."""
    code = Optimizer.profile_hook_step(_cell).__code__
    if getattr(wrapper, "__code__", None) is not code or "func" not in code.co_freevars:
        return None
    return wrapper.__closure__[code.co_freevars.index("func")]


class ClosureUndo:
    """Restores one optimizer after a skipped step with a closure.

    torch's optimizers change nothing before the first evaluation, and evaluate once. The exception
    is L-BFGS, which moves the parameters and evaluates again, up to twenty times. Third-party
    optimizers may move the parameters before the first evaluation (SAM, schedule-free methods), or
    count in `param_groups` or attributes. Parameters are copied for L-BFGS, and for a third-party
    optimizer that requires a closure or has moved the parameters too early in an earlier step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.reevaluates = isinstance(optimizer, LBFGS)
        """Whether this optimizer moves the parameters and evaluates its closure again."""
        self._third_party = is_third_party(optimizer)
        self._copies = self.reevaluates or (self._third_party and _needs_closure(optimizer))
        self._first = True
        self._params: list[tuple[Tensor, Tensor]] = []
        self._state: dict[Any, dict[Any, Any]] = {}
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._changed: list[tuple[dict[str, Any], str, bool, Any]] = []
        self._versions = 0
        self._moved = False

    @property
    def is_complete(self) -> bool:
        """Whether `restore` undoes everything that this step has done so far."""
        return bool(self._params) or not self._moved

    def record(self) -> None:
        """Call it before the step: copies what `restore` needs."""
        self._moved = False
        if self._third_party:
            self._versions = self._sum_of_versions()
            # Attributes and groups may hold counters.
            dicts = [vars(self._optimizer), *self._optimizer.param_groups]
            self._before = [(each, dict(each)) for each in dicts]
        # At the first step it is unknown whether the optimizer moves before it evaluates. A fresh
        # optimizer has not allocated its moments yet, which leaves memory for a copy.
        if self._copies or (self._third_party and self._first and not self._optimizer.state):
            params = gradients.parameters(self._optimizer)
            self._params = [(p, p.detach().clone()) for p in params]
            # L-BFGS keeps a hundred old directions in lists, and never overwrites a direction.
            self._state = {
                p: _copied(s, deep=self._third_party) for p, s in self._optimizer.state.items()
            }
        self._first = False

    def before_evaluation(self) -> None:
        """Call it before each evaluation. Records changes that precede the first evaluation."""
        if not self._third_party:
            return
        if self._sum_of_versions() != self._versions:
            self._moved = self._copies = True
        for values, before in self._before:
            for name in values.keys() | before.keys():
                if name not in values or name not in before or values[name] is not before[name]:
                    self._changed.append((values, name, name in before, before.get(name)))
        self._before = []

    def restore(self) -> None:
        """Restores the recorded values. Does nothing for a step without a closure."""
        for values, name, existed, value in self._changed:
            if existed:
                values[name] = value
            else:
                values.pop(name, None)
        if self._params:
            for p, value in self._params:
                p.detach().copy_(value)
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
        self.clear()

    def clear(self) -> None:
        """Frees the copies."""
        self._params, self._state, self._before, self._changed = [], {}, [], []

    def _sum_of_versions(self) -> int:
        """A number that grows with every write in place to a parameter."""
        return sum(p._version for p in gradients.parameters(self._optimizer))


def _needs_closure(optimizer: Optimizer) -> bool:
    found = inspect.signature(type(optimizer).step).parameters.get("closure")
    return found is not None and found.default is inspect.Parameter.empty


def _copied(value: Any, *, deep: bool) -> Any:
    """Copies dictionaries, tensors and lists; with `deep` also the elements of lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part, deep=deep) for key, part in value.items()}
    if isinstance(value, list):
        return [_copied(part, deep=True) for part in value] if deep else list(value)
    return value
