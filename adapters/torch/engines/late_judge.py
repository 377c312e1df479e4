"""`LateJudge`: judges the steps of an accelerator on the host, after they were taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from healcore.core.decision import Decision
from healcore.core.engine import EngineState
from healcore.core.engine.state import record_numbers
from healcore.core.numerics import SIGNAL_LIMIT
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord, host_record
from healcore.torch.array_namespace import Namespace
from healcore.torch.engines.async_copy import AsyncCopy
from healcore.torch.engines.host import HostEngine
from healcore.torch.engines.stateful import EnforcedDecision, PendingRecord

RECORD_LAG = 10
"""Steps after which the record of a device engine is read. Its copy has arrived by then. The delay
depends only on the number of steps, because every rank has to act on a record at the same step."""


class LateStep:
    """A step that was taken and is judged later.

    Args:
        numbers: the values of the signals that are `present`, in order, (n,) float32.
        present: names of the signals that the step has.

    Attributes:
        state: the engine's state after the step, or None until it is judged.
        decision: the engine's decision, or None until the step is judged.
    """

    def __init__(self, numbers: Tensor, present: Sequence[str]) -> None:
        self._numbers = AsyncCopy(numbers)
        self._present = present
        self.state: EngineState | None = None
        self.decision: Decision | None = None

    def signals(self) -> Signals:
        """The signals, in numbers of NumPy. Waits for their copy."""
        values: dict[str, Any] = dict.fromkeys(Signals._fields)
        values.update(zip(self._present, self._numbers.read(), strict=True))
        return Signals(**values)


class _Norm(NamedTuple):
    """The only signal that a fixed clip reads, in place of `CheckedSignals`."""

    grad_norm: Tensor


class LateJudge:
    """Judges the steps of an accelerator on the host, after they were taken.

        device    norm, finite test, copy to the host, fused kernel | step n + 1 ...
        host      dispatches step n                                 | judges step n - RECORD_LAG

    Only engines with `tests_only_finite` are judged late. Each step is judged by the same function
    of the same float32 numbers as in the step, so only the time of the judgment differs.

    The device needs no result of the host: a step is skipped by the kernel that tests whether it is
    finite. The host needs no result of the device before its copy has arrived. So neither waits.

    Args:
        host: the engine that judges, with the state of the run.
        device: where the gradients are.
    """

    def __init__(self, host: HostEngine, device: torch.device) -> None:
        self.host = host
        self._device = device
        self._xp = Namespace(device)
        self._one = torch.ones((), device=device)
        self._no_action = torch.zeros((), dtype=torch.int32, device=device)
        self._waiting: deque[LateStep] = deque()
        self._recent: deque[LateStep] = deque(maxlen=RECORD_LAG + 1)
        """The newest steps. The oldest of a full queue has been judged."""

    def step(
        self, signals: Signals, found_inf: Tensor | None, divisor: Tensor | None
    ) -> EnforcedDecision:
        """Tests whether a step is finite, and keeps its signals. Reads nothing on the host.

        It also judges the step of `RECORD_LAG` steps ago, whose signals have arrived.

        Args:
            signals: as for `HostEngine.step`.
            found_inf: as for `HostEngine.step`.
            divisor: as for `HostEngine.step`.

        Returns:
            The decision for this step, in 0-d tensors on the device.
        """
        present: list[str] = []
        values: list[Tensor] = []
        for name, value in zip(Signals._fields, signals, strict=True):
            if value is not None:
                present.append(name)
                values.append(value.to(torch.float32))
        numbers = torch.stack(values)
        step = LateStep(numbers, present)
        self._recent.append(step)
        self._waiting.append(step)
        self._judge(lag=RECORD_LAG)
        engine = self.host.step_engine
        skip = torch.zeros((), device=self._device)
        if engine.mode == "observe":
            return EnforcedDecision(skip, self._one, None, self._no_action, grad_divisor=divisor)
        self._test(skip, numbers, present)
        if found_inf is not None:
            skip = ((skip + found_inf) > 0).to(torch.float32)
        scale = self._one
        if engine.config.clip is not None and signals.grad_norm is not None:
            norm = signals.grad_norm
            skip = torch.maximum(skip, (norm > SIGNAL_LIMIT).to(torch.float32))
            # A fixed clip reads nothing but the norm.
            _, clip = engine.config.clip.update(None, _Norm(norm), None, xp=self._xp)
            scale = clip.scale.masked_fill(skip > 0, 1.0)
            if divisor is None:
                divisor = self._one
            divisor = divisor / scale
        return EnforcedDecision(skip, scale, None, self._no_action, grad_divisor=divisor)

    def _test(self, found: Tensor, numbers: Tensor, present: Sequence[str]) -> None:
        """Sets `found` to 1 for a step with NaN or Inf."""
        tested = {"grad_norm"}
        if self.host.step_engine.skips_bad_loss:
            tested.add("loss")
        places = [place for place, name in enumerate(present) if name in tested]
        # `loss` and `grad_norm` are next to each other in `Signals`, so one slice has both.
        parts: list[Tensor] = []
        if places:
            parts.append(numbers[places[0] : places[-1] + 1])
        # One kernel. It multiplies the numbers by 1, which changes no bit.
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            parts, found, self._one
        )

    def _judge(self, *, lag: int = 0) -> None:
        """Judges the waiting steps, except the newest `lag` of them."""
        while len(self._waiting) > lag:
            step = self._waiting.popleft()
            step.decision = self.host.judge(step.signals())
            step.state = self.host.state

    @property
    def compared_decision(self) -> Decision | None:
        """The decision at the step `RECORD_LAG` steps before the last step.

        The newest judged step may differ between the ranks: a program may read the engine's state
        on one rank, which judges all steps of that rank.

        Returns:
            The decision, or None before the run has taken so many steps.
        """
        if len(self._recent) <= RECORD_LAG:
            return None
        return self._recent[0].decision

    def judge_all(self) -> HostEngine:
        """Judges all waiting steps, and returns the engine. Waits for the device.

        Code that reads or replaces the engine's state calls this method first. Otherwise the state
        would lack the steps that are not judged yet.
        """
        self._judge()
        return self.host

    def pending_record(self, name: str) -> PendingRecord:
        """See `HostEngine`. Reading the record judges the steps up to this step."""
        step = self._recent[-1]

        def read() -> StepRecord:
            while step.state is None:
                self._judge(lag=len(self._waiting) - 1)
            return host_record(record_numbers(step.state), name)

        return read
