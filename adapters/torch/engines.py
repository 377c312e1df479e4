"""The policy's engine with the state of one run: in NumPy on the host, or in torch on a device.

`HostEngine` is for CPUs, and for steps whose decision the host needs anyway (one sync per step on
an accelerator). Its step is recorded once (`healcore.core.recorded`) and takes 0.1 ms.

`DeviceEngine` needs no sync. The addresses of its state never change, so that a captured CUDA graph
can update it. An eager step of the preset `default` makes about 200 launches of a few microseconds
each. On an accelerator the step is therefore compiled into a few kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from healcore.core import step_record
from healcore.core.engine import Engine, EngineState, StateError
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord
from healcore.core.tree import leaves, map_leaves
from healcore.core.verdict import Action, Decision
from healcore.torch.measurement import AsyncCopy, read
from healcore.torch.namespace import Namespace

# By default Triton divides approximately and fuses multiply-adds, but decisions must equal NumPy's
# and XLA's bit for bit (numerics.py). For scalars exactness costs nothing.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}
_CUT_LR = int(Action.CUT_LR)  # operations on an IntFlag take microseconds

PendingRecord = Callable[[], StepRecord]
"""Reads the record of a judged step. Waits until the record is on the host."""


class StepOrder(NamedTuple):
    """The decision to enforce at one step: Python numbers, or 0-d tensors on the device."""

    skip: Any
    """Whether to skip, by order of the policy or of a GradScaler: a bool, or float32 0 or 1."""
    grad_scale: Any
    lr_scale: Any
    action: Any
    """Flags of `Action`, as an int."""
    group_scale: Any = None
    """(n,) float32 factors, or None."""
    grad_divisor: Tensor | None = None
    """float32: what the fused kernel divides the gradients by. None if the order is on the host."""

    def to_host(self) -> StepOrder:
        """The order as Python numbers: one sync on an accelerator, none on a CPU."""
        skip, scale, lr_scale, action, groups = read(self[:5])
        return StepOrder(bool(skip > 0), float(scale), float(lr_scale), int(action), groups)


def is_cut(action: int, skip: bool) -> bool:
    """Whether a step with these flags of `Action` cuts the learning rate, and is not skipped."""
    return bool(action & _CUT_LR) and not skip


class _StatefulEngine:
    """Base of both engines. `groups` is the number of parameters.

    Attributes:
        compiled: whether the step runs through torch.compile.
        is_capturing: whether a CUDA graph captures the step. Its replays run no hooks.
        decision: the last step's decision as enforced, in the engine's arrays, or None.
    """

    compiled = is_capturing = False
    _xp: Any

    def __init__(self, engine: Engine, groups: int) -> None:
        self.engine = engine
        self.groups = groups
        self.state: EngineState = self._from_numpy(engine.init(groups=groups))
        self.decision: Decision | None = None

    def _from_numpy(self, state: EngineState) -> EngineState:
        raise NotImplementedError

    def _to_numpy(self) -> EngineState:
        raise NotImplementedError

    def _set_state(self, new: EngineState) -> None:
        raise NotImplementedError

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        self._set_state(self.engine.expect_change(self.state, xp=self._xp))

    def grow(self, groups: int) -> None:
        """Starts a clipping history for added parameters. Leaves of fixed size stay in place."""
        self.groups = groups
        longer = self._from_numpy(self.engine.init(groups=groups))

        def extended(old: Any, new: Any) -> Any:
            if old.shape == new.shape:
                return old
            new[: old.shape[0]] = old
            return new

        self.state = map_leaves(extended, self.state, longer)

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state. A sync on an accelerator."""
        return self.engine.to_dict(self._to_numpy())

    def parse(self, data: Mapping[str, Any]) -> EngineState:
        """A state saved by `Engine.to_dict` of any framework, in NumPy.

        Raises:
            StateError: the state is damaged, or from another policy or number of parameters.
        """
        saved = self.engine.from_dict(data)
        if self.engine.per_tensor and data["groups"] != self.groups:
            raise StateError(
                f"the saved state has {data['groups']} parameters, this optimizer has "
                f"{self.groups}: per-tensor clipping has a history for each; attach to the same "
                "model, or start without the saved state"
            )
        return saved

    def load(self, data: Mapping[str, Any], *, rollback: bool) -> None:
        """Loads a saved state. With `rollback`, keeps the current budgets and LR multiplier."""
        saved = self.parse(data)
        if rollback:
            saved = self.engine.on_rollback(self._to_numpy(), saved, xp=np)
        self._set_state(self._from_numpy(saved))
        self.decision = None


class HostEngine(_StatefulEngine):
    """An engine in NumPy scalars. Its states are immutable."""

    name = "host"
    _xp = np

    def __init__(self, engine: Engine, groups: int) -> None:
        super().__init__(engine, groups)
        self._programs: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """Whether each signal is absent -> the recorded step."""

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> StepOrder:
        """Judges one step. Reads the signals, in one sync on an accelerator.

        Args:
            signals: 0-d float32 tensors.
            found_inf: a GradScaler's flag, above 0 to skip the step, or None.
            divisor: a GradScaler's scale that the gradients still contain, or None.
        """
        *values, overflow = read((*signals, found_inf))
        signals = Signals._make(values)
        ignored = (signals.externally_skipped or 0) > 0
        signals = signals._replace(externally_skipped=np.True_ if ignored else None)
        absent = tuple([value is None for value in signals])
        with np.errstate(all="ignore"):  # the core discards invalid values afterwards
            if absent not in self._programs:
                self._programs[absent] = record(self.engine.step, self.state, signals)
            self.state, decision = self._programs[absent](self.state, signals)
        self.decision = decision
        groups = decision.group_scale
        return StepOrder(
            skip=bool(decision.skip or (overflow or 0) > 0),
            grad_scale=float(decision.grad_scale),
            lr_scale=float(decision.lr_scale),
            action=int(decision.action),
            group_scale=None if groups is None else np.asarray(groups),
        )

    def pending_record(self, name: str = "") -> PendingRecord:
        """A function that reads the last step's record. `name` is the optimizer's name."""
        state = self.state
        return lambda: step_record.to_host(step_record.numbers(state), name)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d CPU tensors."""
        found = self.engine.metrics(self.state)
        return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}

    def grow(self, groups: int) -> None:
        """Starts a clipping history for added parameters."""
        super().grow(groups)
        self._programs.clear()

    def _from_numpy(self, state: EngineState) -> EngineState:
        return map_leaves(lambda leaf: leaf[()], state)  # 0-d arrays become scalars

    def _to_numpy(self) -> EngineState:
        return self.state

    def _set_state(self, new: EngineState) -> None:
        self.state = self._from_numpy(new)


class DeviceEngine(_StatefulEngine):
    """An engine in torch tensors on `device`, whose state is written in place.

    If compilation fails, the step runs eagerly after a warning.
    """

    name = "device"

    def __init__(self, engine: Engine, groups: int, device: torch.device, *, compile: bool) -> None:
        self.device = device
        self._xp = Namespace(device)
        super().__init__(engine, groups)
        self.compiled = compile
        self._compiled_step = _compiled(self._step) if compile else None

    @property
    def is_capturing(self) -> bool:  # type: ignore[override]
        """See `_StatefulEngine`."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> StepOrder:
        """As in `HostEngine`, without reading anything on the host."""
        order = None
        # Dynamo runs nothing compiled in such a mode (a FLOP counter), and torch.compile raises
        # only after it has called the step eagerly: the call below would be a second step.
        if self._compiled_step and not is_in_torch_dispatch_mode(include_infra_modes=False):
            try:
                order, self.decision = self._compiled_step(signals, found_inf, divisor)
            except Exception as error:
                # Tracing and compiling come before the first write, so the state is untouched.
                warnings.warn(
                    "healcore's step could not be compiled and runs eagerly, which is slower: "
                    f"{error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
                self.compiled, self._compiled_step = False, None
        if order is None:
            order, self.decision = self._step(signals, found_inf, divisor)
        return order

    def _step(
        self, signals: Signals, found_inf: Tensor | None, divisor: Tensor | None
    ) -> tuple[StepOrder, Decision]:
        """The compiled part: computes the fused kernel's arguments from the signals."""
        new, decision = self.engine.step(self.state, signals, xp=self._xp)
        self._set_state(new)
        skip = decision.skip if found_inf is None else decision.skip | (found_inf > 0)
        scale = decision.grad_scale
        if self.engine.config.clip is not None:
            divisor = (torch.ones_like(scale) if divisor is None else divisor) / scale
        elif divisor is None:
            divisor = scale  # a policy that does not clip has a scale of 1
        return StepOrder(
            skip=skip.to(torch.float32),
            grad_scale=scale,
            lr_scale=decision.lr_scale,
            action=decision.action,
            group_scale=decision.group_scale,
            grad_divisor=divisor,
        ), decision

    def pending_record(self, name: str = "") -> PendingRecord:
        """As in `HostEngine`. Starts a copy to the host: one tensor, see `step_record.unpack`."""
        values = step_record.numbers(self.state)
        ints = torch.stack(values[: step_record.INTS])  # bool becomes int32
        floats = torch.stack(values[step_record.INTS :])
        copy = AsyncCopy(torch.cat([ints, floats.view(torch.int32)]))
        return lambda: step_record.unpack(copy.read(), name)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors on the device; copies, because the state is written in place."""
        found = self.engine.metrics(self.state)
        return {name: value.detach().clone() for name, value in found.items()}

    def _from_numpy(self, state: EngineState) -> EngineState:
        return map_leaves(lambda leaf: torch.tensor(leaf, device=self.device), state)

    def _to_numpy(self) -> EngineState:
        return map_leaves(lambda leaf: leaf.cpu().numpy(), self.state)

    def _set_state(self, new: EngineState) -> None:
        """Copies every changed leaf of `new` into the state's leaf, in place.

        A leaf that has moved in the tree is cloned first, because another copy may overwrite it.
        """
        before, after = leaves(self.state), leaves(new)
        compiling = torch.compiler.is_compiling()
        if compiling:  # runs at trace time only; Dynamo supports `is`, but not id()
            moved = [any(n is o for o in before) for n in after]
        else:
            known = {id(o) for o in before}
            moved = [id(n) in known for n in after]
        changed = [
            (o, n.clone() if m else n)
            for o, n, m in zip(before, after, moved, strict=True)
            if n is not o
        ]
        if compiling:  # the compiler fuses each copy with the computation
            for o, n in changed:
                o.copy_(n)
            return
        for dtype in {o.dtype for o, _ in changed}:  # one launch per dtype, not per leaf
            pairs = [(o, n) for o, n in changed if o.dtype is dtype]
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [o for o, _ in pairs], [n for _, n in pairs]
            )


def _compiled(step: Any) -> Any:
    """`step` compiled as one graph, with exact arithmetic if this torch has the options."""
    from torch._inductor import list_options

    known = set(list_options())
    options: dict[str, Any] = {name: value for name, value in _EXACT.items() if name in known}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


LiveEngine: TypeAlias = HostEngine | DeviceEngine
"""The engine of one optimizer, with its state."""
