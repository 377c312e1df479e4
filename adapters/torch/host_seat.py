"""The engine on the host, on NumPy scalars: for CPUs, and where the host has to decide anyway.

The engine's step is recorded once as straight Python (`healcore.core.recorded`): a tenth of a
millisecond. A CPU tensor is read without a sync; on an accelerator all signals cross in one copy:
one sync a step.
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
from healcore.torch.measurement import Measurement, Order, read
from healcore.torch.porting import grown, restored


class HostSeat:
    """Runs `engine` in NumPy.

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
        """The engine's step for each set of signals that there are."""

    def order(self, seen: Measurement) -> Order:
        """Judges one step."""
        loss, norm, groups, evaluation, update, divisor, found, voided, rate = read(
            [
                seen.loss,
                seen.grad_norm,
                seen.group_norms,
                seen.eval_loss,
                seen.update_norm,
                seen.grad_divisor,
                seen.found_inf,
                seen.void,
                seen.learning_rate,
            ]
        )
        assert norm is not None
        void = voided is not None and bool(voided)
        if seen.rehearsal and not norm:
            void = True
        with np.errstate(all="ignore"):  # float32 scalars warn where the core selects afterwards
            if divisor is not None:
                norm = norm / divisor
                groups = None if groups is None else groups / divisor
            signals = Signals(
                loss=loss,
                grad_norm=norm,
                group_norms=groups,
                eval_loss=evaluation,
                update_norm=update,
                void=np.True_ if void else None,
                learning_rate=rate,
            )
            signals = Signals(*(None if value is None else _scalar(value) for value in signals))
            self.state, decision = self._program(signals)(self.state, signals)
        self.decision = decision
        group_scale = decision.group_scale
        return Order(
            skip=bool(decision.skip) or (found is not None and bool(found > 0)),
            grad_scale=float(decision.grad_scale),
            lr_scale=float(decision.lr_scale),
            group_scale=None if group_scale is None else np.asarray(group_scale),
        )

    def _program(self, signals: Signals) -> Callable[..., Any]:
        there = tuple(value is not None for value in signals)
        if there not in self._programs:
            self._programs[there] = record(self.engine.step, self.state, signals)
        return self._programs[there]

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        self.state = self.engine.expect_change(self.state, xp=host)

    def decline(self) -> None:
        """Gives back the rollback that was ordered last."""
        self.state = self.engine.decline(self.state, xp=host)

    def grow(self, groups: int) -> None:
        """Begins a history for parameters that were added after the others."""
        self.groups = groups
        self._programs.clear()
        longer = map_leaves(grown, self.state, self.engine.init(groups=groups))
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
        """Takes over a saved state; with `rollback`, budgets and LR multiplier stay."""
        saved = restored(self.engine, data, self.groups)
        if rollback:
            saved = self.engine.on_rollback(self.state, saved, xp=host)
        self.state = map_leaves(_scalar, saved)
        self.decision = None


def _scalar(leaf: Any) -> Any:
    """A 0-d array as a NumPy scalar; arrays with axes as they are."""
    return leaf[()] if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else leaf
