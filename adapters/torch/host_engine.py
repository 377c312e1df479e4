"""`HostEngine`: the engine in NumPy, for CPUs, and where the host needs the decision anyway.

The engine's step is recorded once as straight-line Python (`healcore.core.recorded`): a step takes
a tenth of a millisecond. Reading a CPU tensor is no sync; from an accelerator all signals come in
one copy: one sync per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.core import host
from healcore.core.engine import Engine, EngineState
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.core.verdict import Decision
from healcore.torch.engine_state import extended, from_saved
from healcore.torch.measurement import HostOrder, Measurement, read


class HostEngine:
    """An engine and its state, in NumPy scalars.

    Args:
        engine: the policy's engine.
        groups: number of parameters, for per-tensor clipping.
    """

    name = "host"

    def __init__(self, engine: Engine, groups: int) -> None:
        self.engine = engine
        self.groups = groups
        self.state: EngineState = map_leaves(_scalar, engine.init(groups=groups))
        self.decision: Decision | None = None
        self._programs: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """The recorded step for each set of signals that are present."""

    def step(self, measured: Measurement) -> HostOrder:
        """Judges one step."""
        loss, norm, groups, eval_loss, update, divisor, found_inf, skipped, lr = read(
            [
                measured.loss,
                measured.grad_norm,
                measured.group_norms,
                measured.eval_loss,
                measured.update_norm,
                measured.grad_divisor,
                measured.found_inf,
                measured.externally_skipped,
                measured.learning_rate,
            ]
        )
        assert norm is not None
        externally_skipped = skipped is not None and bool(skipped)
        if measured.state_init and not norm:
            externally_skipped = True
        with np.errstate(all="ignore"):  # float32 scalars warn where the core selects afterwards
            if divisor is not None:
                norm = norm / divisor
                groups = None if groups is None else groups / divisor
            signals = Signals(
                loss=loss,
                grad_norm=norm,
                group_norms=groups,
                eval_loss=eval_loss,
                update_norm=update,
                externally_skipped=np.True_ if externally_skipped else None,
                learning_rate=lr,
            )
            signals = Signals(*(None if value is None else _scalar(value) for value in signals))
            self.state, decision = self._program(signals)(self.state, signals)
        self.decision = decision
        group_scale = decision.group_scale
        return HostOrder(
            skip=bool(decision.skip) or (found_inf is not None and bool(found_inf > 0)),
            grad_scale=float(decision.grad_scale),
            lr_scale=float(decision.lr_scale),
            group_scale=None if group_scale is None else np.asarray(group_scale),
        )

    def _program(self, signals: Signals) -> Callable[..., Any]:
        present = tuple(value is not None for value in signals)
        if present not in self._programs:
            self._programs[present] = record(self.engine.step, self.state, signals)
        return self._programs[present]

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        self.state = self.engine.expect_change(self.state, xp=host)

    def decline(self) -> None:
        """Cancels the rollback that was ordered last: it is not charged to the budget."""
        self.state = self.engine.decline(self.state, xp=host)

    def grow(self, groups: int) -> None:
        """Begins a history for parameters that were added to the optimizer."""
        self.groups = groups
        self._programs.clear()
        longer = map_leaves(extended, self.state, self.engine.init(groups=groups))
        self.state = map_leaves(_scalar, longer)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d CPU tensors."""
        return {
            name: torch.from_numpy(np.array(value))
            for name, value in self.engine.metrics(self.state).items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state."""
        return self.engine.to_dict(self.state)

    def load(self, data: Mapping[str, Any], *, rollback: bool) -> None:
        """Loads a saved state; with `rollback`, budgets and LR multiplier stay."""
        saved = from_saved(self.engine, data, self.groups)
        if rollback:
            saved = self.engine.on_rollback(self.state, saved, xp=host)
        self.state = map_leaves(_scalar, saved)
        self.decision = None


def _scalar(leaf: Any) -> Any:
    """A 0-d array as a NumPy scalar; arrays with axes as they are."""
    return leaf[()] if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else leaf
