"""Undoes what an optimizer does in a step with a closure before healcore knows that it is skipped.

With a closure the step is judged after the first evaluation. torch's optimizers do nothing before
that, and evaluate once; but

- L-BFGS moves and evaluates again, up to twenty times, and a later evaluation may be non-finite;
- others move first: SAM to the point of the highest loss nearby, schedule-free methods to where
  they need the gradient;
- others count first, in `param_groups` or in attributes.

Parameters that have moved can only be restored from a copy. A copy is made for an optimizer that
always needs a closure, or has been seen to move first.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from healcore.torch import gradients
from healcore.torch.third_party_step import is_third_party


class ClosureUndo:
    """What has to be restored after a skipped step of one optimizer with a closure."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._third_party = is_third_party(optimizer)
        self._copies = isinstance(optimizer, LBFGS) or (
            self._third_party and _needs_closure(optimizer)
        )
        self._first = True
        self._params: list[tuple[Tensor, Tensor]] = []
        self._state: dict[Any, dict[Any, Any]] = {}
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._changed: list[tuple[dict[str, Any], str, bool, Any]] = []
        self._versions = 0
        self._moved = False

    @staticmethod
    def reevaluates(optimizer: Optimizer) -> bool:
        """Whether this optimizer evaluates its closure again after it has moved."""
        return isinstance(optimizer, LBFGS)

    @property
    def is_complete(self) -> bool:
        """Whether `restore` undoes everything that this step has done so far."""
        return bool(self._params) or not self._moved

    def record(self, optimizer: Optimizer) -> None:
        """Before the step: copies what `restore` needs."""
        self._moved = False
        if self._third_party:
            self._versions = _versions(optimizer)
            self._before = [(each, dict(each)) for each in _counter_dicts(optimizer)]
        # Whether the first step moves first is not known yet. A fresh optimizer is about to
        # allocate its moments, so there is memory for a copy. A restored one is not worth the risk.
        if self._copies or (self._third_party and self._first and not optimizer.state):
            self._params = [(p, p.detach().clone()) for p in gradients.parameters(optimizer)]
            # L-BFGS keeps a hundred old directions in lists, and never writes into them.
            self._state = {
                p: _copied(s, deep=self._third_party) for p, s in optimizer.state.items()
            }
        self._first = False

    def before_evaluation(self, optimizer: Optimizer) -> None:
        """Before each evaluation: notes what the optimizer has changed before the first."""
        if not self._third_party:
            return
        if _versions(optimizer) != self._versions:
            self._moved = self._copies = True
        for values, before in self._before:
            for name in values.keys() | before.keys():
                if name not in values or name not in before or values[name] is not before[name]:
                    self._changed.append((values, name, name in before, before.get(name)))
        self._before = []

    def restore(self, optimizer: Optimizer) -> None:
        """Restores what was recorded; does nothing for a step without a closure."""
        for values, name, existed, value in self._changed:
            if existed:
                values[name] = value
            else:
                values.pop(name, None)
        if self._params:
            for p, value in self._params:
                p.detach().copy_(value)
            optimizer.state.clear()
            optimizer.state.update(self._state)
        self.clear()

    def clear(self) -> None:
        """Frees the copies."""
        self._params, self._state, self._before, self._changed = [], {}, [], []


def _counter_dicts(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Dictionaries in which an optimizer may keep counters."""
    return [vars(optimizer), *optimizer.param_groups]


def _needs_closure(optimizer: Optimizer) -> bool:
    found = inspect.signature(type(optimizer).step).parameters.get("closure")
    return found is not None and found.default is inspect.Parameter.empty


def _versions(optimizer: Optimizer) -> int:
    """A number that grows whenever a parameter is written in place."""
    return sum(p._version for p in gradients.parameters(optimizer))


def _copied(value: Any, *, deep: bool) -> Any:
    """A copy of dictionaries, tensors and lists; the elements of a list are copied if `deep`."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part, deep=deep) for key, part in value.items()}
    if isinstance(value, list):
        return [_copied(part, deep=True) for part in value] if deep else list(value)
    return value
