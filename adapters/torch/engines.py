"""The policy's engine with the state of one run: in NumPy on the host, or in torch on a device.

`HostEngine` is for CPUs, and where the host needs the decision anyway. Its step is recorded once as
straight-line Python (`healcore.core.recorded`) and takes a tenth of a millisecond. Reading a CPU
tensor is no sync; from an accelerator all signals come in one copy: one sync per step.

`DeviceEngine` keeps its state next to the parameters, without a host sync, in tensors whose
addresses never change: a captured CUDA graph updates it in place, and a rollback restores it in
place. Run eagerly, one step of the preset `default` is some 1,700 launches of a few microseconds
each; on an accelerator it is therefore compiled into a few kernels
(``torch.compile(fullgraph=True)``).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from healcore.core import host, step_record
from healcore.core.engine import Engine, EngineState, StateError
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord
from healcore.core.tree import leaves, map_leaves
from healcore.core.verdict import Decision
from healcore.torch import namespace
from healcore.torch.measurement import AsyncCopy, Measurement, read

# By default Triton divides approximately and fuses multiply-adds. The decisions must equal those of
# NumPy and XLA bit for bit (numerics.py). The core is scalar: exactness costs nothing.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}


class HostOrder(NamedTuple):
    """What to enforce, as Python numbers."""

    skip: bool
    """Skip the step: the policy's skip, or a GradScaler's."""
    grad_scale: float
    lr_scale: float
    group_scale: np.ndarray | None
    """(n,) float32 factors, or None."""


class DeviceOrder(NamedTuple):
    """What to enforce, as tensors, for fused kernels that read it on the device."""

    found_inf: Tensor
    """0-d float32, exactly 0 or 1: 1 skips the step."""
    grad_divisor: Tensor
    """0-d float32: the fused kernel divides the gradients by it."""
    lr_scale: Tensor
    """0-d float32."""
    grad_scale: Tensor
    """0-d float32 in [0, 1]."""
    group_scale: Tensor | None
    """(n,) float32, or None."""

    def on_host(self) -> HostOrder:
        """The order as Python numbers: one sync on an accelerator, none on a CPU."""
        found_inf, scale, lr_scale, groups = read(
            [self.found_inf, self.grad_scale, self.lr_scale, self.group_scale]
        )
        return HostOrder(bool(found_inf > 0), float(scale), float(lr_scale), groups)


class PendingRecord(Protocol):
    """The record of a judged step, before it is read on the host."""

    def read(self) -> StepRecord:
        """The record; waits for its copy to the host if it has not finished."""
        ...


class LiveEngine(ABC):
    """An engine with the state of one run.

    Args:
        engine: the policy's engine.
        groups: number of parameters, for per-tensor clipping.
    """

    name: ClassVar[str]
    compiled = False
    """Whether the step runs through torch.compile."""
    _xp: Any
    """Array namespace of the state."""

    def __init__(self, engine: Engine, groups: int) -> None:
        self.engine = engine
        self.groups = groups
        self.state: EngineState = map_leaves(self._placed, engine.init(groups=groups))
        self.decision: Decision | None = None

    @abstractmethod
    def step(self, measured: Measurement) -> HostOrder | DeviceOrder:
        """Judges one step."""

    @abstractmethod
    def pending_record(self) -> PendingRecord:
        """The record of the step that was judged last."""

    @abstractmethod
    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors; copies, on the engine's device."""

    @abstractmethod
    def _placed(self, leaf: Any) -> Any:
        """A NumPy leaf of a state as this engine holds it."""

    @abstractmethod
    def _replace_state(self, new: EngineState) -> None: ...

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        self._replace_state(self.engine.expect_change(self.state, xp=self._xp))

    def decline(self) -> None:
        """Cancels the rollback that was ordered last: it is not charged to the budget."""
        self._replace_state(self.engine.decline(self.state, xp=self._xp))

    def grow(self, groups: int) -> None:
        """Begins a history for parameters that were added to the optimizer.

        Leaves whose size does not depend on the parameters stay the same objects.
        """
        self.groups = groups
        new = map_leaves(self._placed, self.engine.init(groups=groups))
        self.state = map_leaves(_extended, self.state, new)

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state. A sync on an accelerator."""
        return self.engine.to_dict(self.state)

    def parsed(self, data: Mapping[str, Any]) -> EngineState:
        """A saved state in NumPy, checked against policy and parameters.

        Args:
            data: what `Engine.to_dict` wrote, from torch, JAX or NumPy.

        Raises:
            StateError: it is damaged, or of another policy or number of parameters.
        """
        saved = self.engine.from_dict(data)
        if self.engine.per_tensor and data["groups"] != self.groups:
            raise StateError(
                f"the saved state is of {data['groups']} parameters, this optimizer has "
                f"{self.groups}: per-tensor clipping keeps a level for each; attach to the same "
                "model, or start fresh"
            )
        return saved

    def load(self, data: Mapping[str, Any], *, rollback: bool) -> None:
        """Loads a saved state; with `rollback`, budgets and LR multiplier stay."""
        saved = map_leaves(self._placed, self.parsed(data))
        if rollback:
            saved = self.engine.on_rollback(self.state, saved, xp=self._xp)
        self._replace_state(saved)
        self.decision = None


class HostEngine(LiveEngine):
    """An engine in NumPy scalars. Its states are immutable."""

    name = "host"
    _xp = host

    def __init__(self, engine: Engine, groups: int) -> None:
        super().__init__(engine, groups)
        self._programs: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """The recorded step for each set of signals that are present."""

    def _placed(self, leaf: Any) -> Any:
        """A 0-d array as a NumPy scalar; arrays with axes as they are."""
        return leaf[()] if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else leaf

    def _replace_state(self, new: EngineState) -> None:
        self.state = map_leaves(self._placed, new)

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
        externally_skipped = bool(skipped) or (measured.state_init and not norm)
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
            signals = Signals(*map(self._placed, signals))
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

    def pending_record(self) -> PendingRecord:
        """A reference to the state."""
        return _HostRecord(self.state)

    def grow(self, groups: int) -> None:
        """See `LiveEngine.grow`."""
        super().grow(groups)
        self._programs.clear()

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d CPU tensors."""
        return {
            name: torch.from_numpy(np.array(value))
            for name, value in self.engine.metrics(self.state).items()
        }


class _HostRecord:
    def __init__(self, state: EngineState) -> None:
        self._state = state

    def read(self) -> StepRecord:
        return step_record.on_host(step_record.numbers(self._state))


class DeviceEngine(LiveEngine):
    """An engine in torch tensors, written in place.

    Args:
        engine: the policy's engine.
        groups: number of parameters, for per-tensor clipping.
        device: where the first parameter is.
        compile: whether to compile the step; falls back to eager, with a warning, where there is
            no compiler.
    """

    name = "device"

    def __init__(self, engine: Engine, groups: int, device: torch.device, *, compile: bool) -> None:
        self.device = device
        self.compiled = compile
        self._xp = namespace.on(device)
        super().__init__(engine, groups)
        self._run = _compiled(self._step) if compile else self._step

    def _placed(self, leaf: Any) -> Tensor:
        return torch.tensor(leaf, device=self.device)

    def _replace_state(self, new: EngineState) -> None:
        """Copies every leaf of `new` over the state's, in place.

        An unchanged leaf is left alone. A leaf that has moved to another position in the tree is
        cloned first: it might be overwritten before it is read.
        """
        before, after = leaves(self.state), leaves(new)
        compiling = torch.compiler.is_compiling()
        if compiling:  # at trace time only, and Dynamo knows `is`, not id()
            moved = [any(n is o for o in before) for n in after]
        else:
            known = {id(o) for o in before}
            moved = [id(n) in known for n in after]
        changed = [
            (o, n.clone() if m else n)
            for o, n, m in zip(before, after, moved, strict=True)
            if n is not o
        ]
        if compiling:  # into the kernels that compute them
            for o, n in changed:
                o.copy_(n)
            return
        for dtype in {o.dtype for o, _ in changed}:  # one launch for each, not for every leaf
            pairs = [(o, n) for o, n in changed if o.dtype is dtype]
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [o for o, _ in pairs], [n for _, n in pairs]
            )

    def step(self, measured: Measurement) -> DeviceOrder:
        """Judges one step without reading anything on the host."""
        try:
            order, self.decision = self._run(measured)
        except Exception as error:
            if not self.compiled:
                raise
            # Tracing and compiling come before the first write: the state is untouched.
            warnings.warn(
                f"healcore's step could not be compiled and runs eagerly, which is slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.compiled, self._run = False, self._step
            order, self.decision = self._step(measured)
        return order

    def _step(self, measured: Measurement) -> tuple[DeviceOrder, Decision]:
        """The compiled part: signals, engine, state written in place, arguments of the kernel."""
        norm, groups, overflowed = measured.grad_norm, measured.group_norms, None
        assert norm is not None
        if measured.grad_divisor is not None:
            norm = norm / measured.grad_divisor
            groups = None if groups is None else groups / measured.grad_divisor
        if measured.found_inf is not None:
            overflowed = measured.found_inf > 0
        skipped = measured.externally_skipped
        if measured.state_init:
            skipped = norm == 0 if skipped is None else skipped | (norm == 0)
        signals = Signals(
            loss=measured.loss,
            grad_norm=norm,
            group_norms=groups,
            eval_loss=measured.eval_loss,
            update_norm=measured.update_norm,
            externally_skipped=skipped,
            learning_rate=measured.learning_rate,
        )
        new, decision = self.engine.step(self.state, signals, xp=self._xp)
        self._replace_state(new)
        skip = decision.skip if overflowed is None else decision.skip | overflowed
        base = measured.grad_divisor
        if base is None:
            base = torch.ones_like(decision.grad_scale)
        return DeviceOrder(
            found_inf=skip.to(torch.float32),
            grad_divisor=base / decision.grad_scale,
            lr_scale=decision.lr_scale,
            grad_scale=decision.grad_scale,
            group_scale=decision.group_scale,
        ), decision

    def pending_record(self) -> PendingRecord:
        """The record packed into one tensor, whose copy to the host begins now.

        The state is about to be overwritten. By the time the record is read the copy, which comes
        before the optimizer's kernels, has long finished.
        """
        return _DeviceRecord(self.state)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors on the device; copies, since the state is written in place."""
        found = self.engine.metrics(self.state)
        return {name: value.detach().clone() for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state. A sync."""
        return self.engine.to_dict(map_leaves(lambda leaf: leaf.cpu().numpy(), self.state))


class _DeviceRecord:
    def __init__(self, state: EngineState) -> None:
        values = step_record.numbers(state)
        ints, floats = values[: step_record.INTS], values[step_record.INTS :]
        packed = [n.to(torch.int32) for n in ints] + [x.view(torch.int32) for x in floats]
        self._packed = AsyncCopy(torch.stack(packed))

    def read(self) -> StepRecord:
        return step_record.unpack(self._packed.read())


def _extended(old: Any, new: Any) -> Any:
    """A leaf of a state for more parameters: `new` beginning with `old`; `old` if the same size."""
    if old.shape == new.shape:
        return old
    new[: old.shape[0]] = old
    return new


def _compiled(step: Any) -> Any:
    """`step` compiled as one graph, with exact arithmetic where this torch has the options."""
    from torch._inductor import list_options

    known = set(list_options())
    options: dict[str, Any] = {name: value for name, value in _EXACT.items() if name in known}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)
