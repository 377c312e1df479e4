"""`DeviceEngine`: the engine next to the parameters, whose steps read nothing on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from healcore.core.decision import Decision
from healcore.core.engine import Engine, EngineState
from healcore.core.engine.state import record_numbers
from healcore.core.signals import Signals
from healcore.core.step_record import RECORD_INTS, StepRecord, host_record
from healcore.core.trees import leaves
from healcore.torch.array_namespace import Namespace
from healcore.torch.engines.async_copy import AsyncCopy
from healcore.torch.engines.host import HostEngine
from healcore.torch.engines.late_judge import LateJudge
from healcore.torch.engines.stateful import EnforcedDecision, PendingRecord, StatefulEngine

# By default Triton divides approximately and fuses multiply-adds, but decisions must equal NumPy's
# and XLA's bit for bit (numerics.py). For scalars exactness costs nothing.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}


class DeviceEngine(StatefulEngine):
    """An engine for steps on `device`. A step reads nothing on the host.

    The policy decides which of two ways a step takes:

        tests_only_finite    LateJudge: a finite test on the device, the rest later on the host
        any other policy     the whole engine on the device, compiled if `compile` is True

    If compilation fails, the step runs eagerly after a warning.

    Args:
        engine: the policy's engine.
        tensors: number of tensors, the parameters of the optimizer.
        device: where the gradients are.
        compile: whether a step that decides by the engine's state is compiled.
    """

    name = "device"
    is_late = True

    def __init__(
        self, engine: Engine, tensors: int, device: torch.device, *, compile: bool
    ) -> None:
        to_leaf = partial(torch.tensor, device=device)
        self._device = device
        super().__init__(engine, tensors, xp=Namespace(device), to_leaf=to_leaf)
        self.compiled = compile
        self._compiled_step: Callable[..., tuple[EnforcedDecision, Decision]] | None = None
        if compile:
            self._compiled_step = _compiled(self._step)

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> EnforcedDecision:
        """Judges one step without a sync, see `HostEngine.step`.

        Returns:
            The decision for this step, in 0-d tensors on the device.
        """
        if self._late is not None:
            return self._late.step(signals, found_inf, divisor)
        self._record_copies = None
        enforced = None
        # Dynamo runs nothing compiled in such a mode (a FLOP counter), and torch.compile raises
        # only after it has called the step eagerly: the call below would be a second step.
        if self._compiled_step and not is_in_torch_dispatch_mode(include_infra_modes=False):
            try:
                enforced, self._decision = self._compiled_step(signals, found_inf, divisor)
            except Exception as error:
                # Tracing and compiling come before the first write, so the state is untouched.
                warnings.warn(
                    "healcore's step could not be compiled and runs eagerly, which is slower: "
                    f"{error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
                self.compiled = False
                self._compiled_step = None
        if enforced is None:
            enforced, self._decision = self._step(signals, found_inf, divisor)
        return enforced

    def start(self, state: EngineState) -> None:
        """See the base class. The policy may judge late again once a limit is gone."""
        super().start(state)
        self._record_copies: tuple[AsyncCopy, AsyncCopy] | None = None
        """Copies of the last step's record, which all its readers share, or None before one."""
        self._late: LateJudge | None = None
        if self.step_engine.tests_only_finite:
            host = HostEngine(self.engine, self.tensors)
            host.start(state)
            self._late = LateJudge(host, self._device)

    @property
    def judges_late(self) -> bool:
        """Whether steps are judged after they were taken, see `LateJudge`.

        True for a policy whose decisions follow from the step alone: from a test for NaN and Inf,
        and from a fixed clip. The device needs no state for such decisions, so the host can judge
        later.
        """
        return self._late is not None

    @property
    def state(self) -> EngineState:
        """The state after the last step.

        If steps are judged late, all steps so far are judged now. That waits for the device, so do
        not read the state at every step.
        """
        if self._late is None:
            return self._state
        return self._late.judge_all().state

    @property
    def decision(self) -> Decision | None:
        """The last step's decision as enforced, or None. Waits as `state` does."""
        if self._late is None:
            return self._decision
        return self._late.judge_all().decision

    @property
    def compared_decision(self) -> Decision | None:
        """See the base class. Does not wait."""
        if self._late is None:
            return self._decision
        return self._late.compared_decision

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        if self._late is None:
            super().expect_change()
        else:
            self._late.judge_all().expect_change()

    def grow(self, tensors: int) -> None:
        """Starts a clipping history for added parameters."""
        super().grow(tensors)
        if self._late is not None:
            self._late.judge_all().grow(tensors)

    def _step(
        self, signals: Signals, found_inf: Tensor | None, divisor: Tensor | None
    ) -> tuple[EnforcedDecision, Decision]:
        """The compiled part: computes the fused kernel's arguments from the signals."""
        new, decision = self.step_engine.step(self._state, signals, xp=self._xp)
        if torch.compiler.is_compiling():
            self._write(new)
        else:
            self._state = new
        skip = decision.skip
        if found_inf is not None:
            skip = skip | (found_inf > 0)
        if self.step_engine.scales_grads:
            if divisor is None:
                divisor = torch.ones_like(decision.grad_scale)
            divisor = divisor / decision.grad_scale
        lr_scale = None
        if self.step_engine.scales_lr:
            lr_scale = decision.lr_scale
        enforced = EnforcedDecision(
            skip=skip.to(torch.float32),
            grad_scale=decision.grad_scale,
            lr_scale=lr_scale,
            action=decision.action,
            group_scale=decision.group_scale,
            grad_divisor=divisor,
        )
        return enforced, decision

    def _write(self, new: EngineState) -> None:
        """Writes a new state in place, so that the graph has the same inputs at every step."""
        before = leaves(self._state)
        writes: list[tuple[Tensor, Tensor]] = []
        for old, leaf in zip(before, leaves(new), strict=True):
            if leaf is old:
                continue
            # A leaf that has moved in the tree is cloned first, because it may be overwritten.
            if any(leaf is other for other in before):
                leaf = leaf.clone()
            writes.append((old, leaf))
        for old, leaf in writes:
            old.copy_(leaf)

    def pending_record(self, name: str = "") -> PendingRecord:
        """See `HostEngine`. The first call after a step starts a copy to the host."""
        if self._late is not None:
            return self._late.pending_record(name)
        if self._record_copies is None:
            values = record_numbers(self.state)
            # Two variables for the tensors and two for the copies: see `keep_after_cuda_error`.
            ints = torch.stack(values[:RECORD_INTS])  # bool becomes int32
            int_copy = AsyncCopy(ints)
            floats = torch.stack(values[RECORD_INTS:])
            float_copy = AsyncCopy(floats)
            self._record_copies = (int_copy, float_copy)
        int_copy, float_copy = self._record_copies

        def read() -> StepRecord:
            numbers = [*int_copy.read().tolist(), *float_copy.read().tolist()]
            return host_record(numbers, name)

        return read


def _compiled(step: Any) -> Any:
    """`step` compiled as one graph, with exact arithmetic if this torch has the options."""
    from torch._inductor import list_options

    known = list_options()
    options: dict[str, Any] = {}
    for name, value in _EXACT.items():
        if name in known:
            options[name] = value
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)
