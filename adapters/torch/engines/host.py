"""`HostEngine`: the policy's engine in NumPy scalars, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from healcore.core.array_namespace import NUMPY
from healcore.core.decision import Decision
from healcore.core.engine import Engine
from healcore.core.engine.state import record_numbers
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord, host_record
from healcore.core.tape import to_program
from healcore.torch.engines.stateful import EnforcedDecision, PendingRecord, StatefulEngine, to_host


class HostEngine(StatefulEngine):
    """An engine in NumPy scalars. A step reads the signals, in one sync on an accelerator.

    The step is recorded once for each combination of signals, as straight-line Python without the
    core's calls and its branches on the configuration (`healcore.core.tape`).

    Args:
        engine: the policy's engine.
        tensors: number of tensors, the parameters of the optimizer.
    """

    name = "host"

    def __init__(self, engine: Engine, tensors: int) -> None:
        # `leaf[()]` makes scalars of 0-d arrays.
        super().__init__(engine, tensors, xp=NUMPY, to_leaf=lambda leaf: leaf[()])
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        """Engine, number of parameters and the signals' types -> the recorded step."""

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> EnforcedDecision:
        """Judges one step.

        Args:
            signals: 0-d float32 tensors. A signal that the step does not have is None.
            found_inf: a GradScaler's flag, 0-d float32, above 0 to skip the step; or None.
            divisor: the GradScaler's scale if the gradients still contain it, 0-d float32; or None.
                Only decisions on the device need it.

        Returns:
            The decision for this step.
        """
        *values, overflow = to_host((*signals, found_inf))
        decision = self.judge(Signals._make(values))
        skip = bool(decision.skip)
        if overflow is not None and overflow > 0:
            skip = True
        group_scale = decision.group_scale
        if group_scale is not None:
            group_scale = np.asarray(group_scale)
        return EnforcedDecision(
            skip=skip,
            grad_scale=float(decision.grad_scale),
            lr_scale=float(decision.lr_scale),
            action=int(decision.action),
            group_scale=group_scale,
        )

    def judge(self, signals: Signals) -> Decision:
        """Judges one step, advances the state, and returns the decision.

        Args:
            signals: scalars and arrays of NumPy, or None for what the step does not have.

        Returns:
            The decision in scalars of NumPy.
        """
        if signals.externally_skipped is not None:
            externally_skipped = None
            if signals.externally_skipped > 0:
                externally_skipped = np.True_
            signals = signals._replace(externally_skipped=externally_skipped)
        # A recorded step holds for these types only: an absent signal leaves no operation in it.
        key = (self.step_engine, self.tensors, *map(type, signals))
        with np.errstate(all="ignore"):  # the core discards invalid values afterwards
            program = self._programs.get(key)
            if program is None:
                program = to_program(self.step_engine.step, self._state, signals)
                self._programs[key] = program
            self._state, decision = program(self._state, signals)
        self._decision = decision
        return decision

    def pending_record(self, name: str = "") -> PendingRecord:
        """A function that reads the last step's record, also after later steps.

        Args:
            name: the optimizer's name in the run, or an empty string.
        """
        state = self._state

        def read() -> StepRecord:
            return host_record(record_numbers(state), name)

        return read
