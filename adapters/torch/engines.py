"""The policy's engine with the state of one run: in NumPy on the host, or in torch on a device.

`HostEngine` is for CPUs, and for steps whose decision the host needs anyway (one sync per step on
an accelerator). Its step is recorded once (`healcore.core.tape`) and takes 0.1 ms.

`DeviceEngine` needs no sync. Which of two ways it takes follows from the policy:

- Most of `default` and `observe` can wait: only a test for NaN and Inf stands in the step
  (`Engine.tests_only_finite`). The host judges the step from a copy of its signals when the copy
  has arrived, with the same function in NumPy (`LateJudge`).
- A policy that clips by statistics, skips spikes, or cuts the learning rate decides in the step. An
  eager step makes over 100 launches of a few microseconds each, so it is compiled into a few
  kernels.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from healcore.core.array_namespace import NUMPY
from healcore.core.decision import RECORD_INTS, Action, Decision, StepRecord, host_record
from healcore.core.engine import Engine, EngineState, StateError
from healcore.core.engine.state import record_numbers
from healcore.core.errors import AttachError
from healcore.core.numerics import (
    SIGNAL_LIMIT,
    as_written,
    leaves,
    map_leaves,
)
from healcore.core.signals import Signals
from healcore.core.tape import to_program
from healcore.torch.array_namespace import Namespace

# By default Triton divides approximately and fuses multiply-adds, but decisions must equal NumPy's
# and XLA's bit for bit (numerics.py). For scalars exactness costs nothing.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}
_CUT_LR = int(Action.CUT_LR)  # operations on an IntFlag take microseconds
RECORD_LAG = 10
"""Steps after which the record of a device engine is read. Its copy has arrived by then. The delay
depends only on the number of steps, because every rank has to act on a record at the same step."""

PendingRecord = Callable[[], StepRecord]
"""Reads the record of a judged step. Waits until the record is on the host."""


class StepOrder(NamedTuple):
    """The decision to enforce at one step: Python numbers, or 0-d tensors on the device.

    A `Decision` of the core says what the policy wants. An order adds what only the adapter knows:
    the GradScaler's overflow, and the scale that the gradients still contain. All fields are on the
    same side, except `clip_factor`, which stays a tensor: `isinstance(order.skip, Tensor)` tells
    the `Enforcer` which side that is.
    """

    skip: Any
    """Whether to skip, by order of the policy or of a GradScaler: a bool, or float32 0 or 1."""
    grad_scale: Any
    """Factor of all gradients, float32. 1 changes nothing."""
    lr_scale: Any
    """Factor of the learning rate, or None if the policy cannot scale the rate at this step."""
    action: Any
    """Flags of `Action`, as an int."""
    group_scale: Any = None
    """(n,) float32 factors, or None."""
    grad_divisor: Tensor | None = None
    """float32: divisor of the gradients in the fused kernel, or None without a division."""
    clip_factor: Tensor | None = None
    """Factor of `torch.nn.utils.clip_grad_norm_`, at most 1: applied in place of `grad_scale` and
    `grad_divisor`, from which it differs in the last bits. None except for a fixed clip."""

    def to_host(self) -> StepOrder:
        """The order as Python numbers: one sync on an accelerator, none on a CPU."""
        skip, grad_scale, lr_scale, action, group_scale = to_host(self[:5])
        if lr_scale is None:
            lr_scale = 1.0
        return StepOrder(
            skip=bool(skip > 0),
            grad_scale=float(grad_scale),
            lr_scale=float(lr_scale),
            action=int(action),
            group_scale=group_scale,
            clip_factor=self.clip_factor,
        )


def is_cut(action: int, skip: bool) -> bool:
    """Whether a step with these flags of `Action` cuts the learning rate, and is not skipped."""
    return bool(action & _CUT_LR) and not skip


class _StatefulEngine:
    """Base of both engines: the policy's pure engine, and the state that it has reached.

    Args:
        engine: the policy's engine.
        groups: number of parameters.
        xp: array namespace of the core.
        place: makes a leaf of the state from a NumPy array.

    Attributes:
        engine: the policy's engine.
        stepping: the engine that makes the steps, see `Engine.without_limit`.
        groups: number of parameters.
        max_norm: the limit of the policy's fixed clip, or None. None too in observe mode, and while
            a limit that a rollback has set may be lower.
    """

    compiled = False
    """Whether the step runs through torch.compile."""
    is_late = False
    """Whether a record is read some steps later, because it is copied from an accelerator."""
    judges_late = False
    """Whether steps are judged after they were taken, see `LateJudge`."""

    def __init__(
        self, engine: Engine, groups: int, *, xp: Any, place: Callable[[np.ndarray], Any]
    ) -> None:
        self.engine = engine
        self.groups = groups
        self._xp = xp
        self._place = place
        self._start(engine.init(groups=groups))

    def _start(self, state: EngineState) -> None:
        """Continues from a state in NumPy."""
        self.stepping = self.engine.without_limit(state)
        clip = self.engine.config.clip
        is_alone = self.engine.mode != "observe" and not self.stepping.limits_norm
        self.max_norm = None
        if clip is not None and clip[0] == "fixed" and is_alone:
            self.max_norm = as_written(clip[1].max_norm)
        self._state: EngineState = map_leaves(self._place, state)
        self._decision: Decision | None = None

    @property
    def state(self) -> EngineState:
        """The state after the last step, in scalars of NumPy or in tensors."""
        return self._state

    @property
    def decision(self) -> Decision | None:
        """The last step's decision as enforced, in the engine's arrays, or None."""
        return self._decision

    @property
    def compared_decision(self) -> Decision | None:
        """The decision that several ranks compare at the next step. Waits for nothing.

        The last decision, or the decision of a fixed number of steps ago if steps are judged late.
        So the ranks compare the decisions of the same step.
        """
        return self._decision

    def _to_numpy(self) -> EngineState:
        def leaf_to_numpy(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.cpu().numpy()
            return leaf

        return map_leaves(leaf_to_numpy, self.state)

    def metrics(self) -> dict[str, Tensor]:
        """Numbers of the last step for a logger, see `Healing.metrics`.

        Waits for the device if steps are judged late.

        Returns:
            Name -> 0-d tensor. Copies, because a compiled step writes the state in place.
        """
        metrics = self.engine.metrics(self.state)
        return {name: torch.as_tensor(value).clone() for name, value in metrics.items()}

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        self._state = self.engine.expect_change(self._state, xp=self._xp)

    def grow(self, groups: int) -> None:
        """Starts a clipping history for added parameters.

        The state of all other detectors, and the histories of the first parameters, stay.

        Args:
            groups: the new number of parameters, larger than before.
        """
        self.groups = groups

        def extended(old: Any, new: Any) -> Any:
            if old.shape != new.shape:
                new[: old.shape[0]] = old
                return new
            return old

        new = map_leaves(self._place, self.engine.init(groups=groups))
        self._state = map_leaves(extended, self._state, new)

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state. A sync on an accelerator."""
        return self.engine.to_dict(self._to_numpy())

    def parse(self, data: Mapping[str, Any]) -> EngineState:
        """Checks a saved state and converts it. The engine itself does not change.

        Args:
            data: the result of `Engine.to_dict`, from any framework.

        Returns:
            The state with leaves of NumPy.

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
        """Continues from a saved state.

        Args:
            data: see `parse`.
            rollback: whether the run has rolled back. It then keeps its current budgets and its
                learning-rate multiplier, or it could roll back without end.

        Raises:
            StateError: see `parse`. Nothing was changed.
        """
        saved = self.parse(data)
        if rollback:
            saved = self.engine.on_rollback(self._to_numpy(), saved, xp=np)
        self._start(saved)


class HostEngine(_StatefulEngine):
    """An engine in NumPy scalars. A step reads the signals, in one sync on an accelerator.

    The step is recorded once for each combination of signals, as straight-line Python without the
    core's calls and its branches on the configuration (`healcore.core.tape`).

    Args:
        engine: the policy's engine.
        groups: number of parameters.
    """

    name = "host"

    def __init__(self, engine: Engine, groups: int) -> None:
        super().__init__(engine, groups, xp=NUMPY, place=lambda leaf: leaf[()])  # 0-d: scalars
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        """Engine, number of parameters and the signals' types -> the recorded step."""

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> StepOrder:
        """Judges one step.

        Args:
            signals: 0-d float32 tensors. A signal that the step does not have is None.
            found_inf: a GradScaler's flag, 0-d float32, above 0 to skip the step; or None.
            divisor: the GradScaler's scale if the gradients still contain it, 0-d float32; or None.
                Only orders on the device need it.

        Returns:
            The order for this step.
        """
        *values, overflow = to_host((*signals, found_inf))
        decision = self.judge(Signals._make(values))
        skip = bool(decision.skip)
        if overflow is not None and overflow > 0:
            skip = True
        group_scale = decision.group_scale
        if group_scale is not None:
            group_scale = np.asarray(group_scale)
        return StepOrder(
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
            externally_skipped = np.True_ if signals.externally_skipped > 0 else None
            signals = signals._replace(externally_skipped=externally_skipped)
        # A recorded step holds for these types only: an absent signal leaves no operation in it.
        key = (self.stepping, self.groups, *map(type, signals))
        with np.errstate(all="ignore"):  # the core discards invalid values afterwards
            program = self._programs.get(key)
            if program is None:
                program = to_program(self.stepping.step, self._state, signals)
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
    """What a fixed clip reads of a step."""

    grad_norm: Tensor


class LateJudge:
    """Judges the steps of an accelerator on the host, after they were taken.

        device    norm, finite test, copy to the host, fused kernel | step n + 1 ...
        host      dispatches step n                                 | judges step n - RECORD_LAG

    Each step is judged by the same function of the same float32 numbers as in the step, so that
    nothing but the time differs. For engines with `tests_only_finite`.

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

    def step(self, signals: Signals, found_inf: Tensor | None, divisor: Tensor | None) -> StepOrder:
        """Tests whether a step is finite, and keeps its signals. Reads nothing on the host.

        Also judges the step of `RECORD_LAG` steps ago, whose signals have arrived.

        Args:
            signals: as for `HostEngine.step`.
            found_inf: as for `HostEngine.step`.
            divisor: as for `HostEngine.step`.

        Returns:
            The order for this step, in 0-d tensors on the device.
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
        engine = self.host.stepping
        skip = torch.zeros((), device=self._device)
        if engine.mode == "observe":
            return StepOrder(skip, self._one, None, self._no_action, grad_divisor=divisor)
        self._test(skip, numbers, present)
        if found_inf is not None:
            skip = ((skip + found_inf) > 0).to(torch.float32)
        scale = self._one
        if engine.config.clip is not None and signals.grad_norm is not None:
            norm = signals.grad_norm
            skip = torch.maximum(skip, (norm > SIGNAL_LIMIT).to(torch.float32))
            # A fixed clip reads nothing but the norm.
            _, clip = engine.config.clip[1].update(None, _Norm(norm), None, xp=self._xp)
            scale = clip.scale.masked_fill(skip > 0, 1.0)
            if divisor is None:
                divisor = self._one
            divisor = divisor / scale
        return StepOrder(skip, scale, None, self._no_action, grad_divisor=divisor)

    def _test(self, found: Tensor, numbers: Tensor, present: Sequence[str]) -> None:
        """Sets `found` to 1 for a step with NaN or Inf."""
        tested = {"grad_norm"}
        if self.host.stepping.skips_bad_loss:
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
        """The decision of `RECORD_LAG` steps before the last step, or None if there is none.

        Not of the newest step that is judged: a program may read the engine's state on one rank,
        which judges all steps of that rank.
        """
        if len(self._recent) <= RECORD_LAG:
            return None
        return self._recent[0].decision

    def finished(self) -> HostEngine:
        """The engine after all steps, which are judged now. Waits for the device."""
        self._judge()
        return self.host

    def pending_record(self, name: str) -> PendingRecord:
        """As in `HostEngine`. Reading the record judges the steps up to this step."""
        step = self._recent[-1]

        def read() -> StepRecord:
            while step.state is None:
                self._judge(lag=len(self._waiting) - 1)
            return host_record(record_numbers(step.state), name)

        return read


class DeviceEngine(_StatefulEngine):
    """An engine for steps on `device`. A step reads nothing on the host.

    The policy decides which of two ways a step takes:

        tests_only_finite    LateJudge: a finite test on the device, the rest later on the host
        any other policy     the whole engine on the device, compiled if `compile` is True

    If compilation fails, the step runs eagerly after a warning.

    Args:
        engine: the policy's engine.
        groups: number of parameters.
        device: where the gradients are.
        compile: whether a step that decides by the engine's state is compiled.
    """

    name = "device"
    is_late = True

    def __init__(self, engine: Engine, groups: int, device: torch.device, *, compile: bool) -> None:
        place = partial(torch.tensor, device=device)
        self._device = device
        super().__init__(engine, groups, xp=Namespace(device), place=place)
        self.compiled = compile
        self._compiled_step: Callable[..., tuple[StepOrder, Decision]] | None = None
        if compile:
            self._compiled_step = _compiled(self._step)

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> StepOrder:
        """Judges one step without a sync, see `HostEngine.step`.

        Returns:
            The order for this step, in 0-d tensors on the device.
        """
        if self._late is not None:
            return self._late.step(signals, found_inf, divisor)
        order = None
        # Dynamo runs nothing compiled in such a mode (a FLOP counter), and torch.compile raises
        # only after it has called the step eagerly: the call below would be a second step.
        if self._compiled_step and not is_in_torch_dispatch_mode(include_infra_modes=False):
            try:
                order, self._decision = self._compiled_step(signals, found_inf, divisor)
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
        if order is None:
            order, self._decision = self._step(signals, found_inf, divisor)
        return order

    def _start(self, state: EngineState) -> None:
        super()._start(state)
        self._late: LateJudge | None = None
        if self.stepping.tests_only_finite:
            host = HostEngine(self.engine, self.groups)
            host._start(state)
            self._late = LateJudge(host, self._device)

    @property
    def judges_late(self) -> bool:
        """Whether steps are judged after they were taken, see `LateJudge`."""
        return self._late is not None

    @property
    def state(self) -> EngineState:
        """The state after the last step. Waits for the device if steps are judged late."""
        if self._late is None:
            return self._state
        return self._late.finished().state

    @property
    def decision(self) -> Decision | None:
        """The last step's decision as enforced, or None. Waits as `state` does."""
        if self._late is None:
            return self._decision
        return self._late.finished().decision

    @property
    def compared_decision(self) -> Decision | None:
        """See the base class. Waits for nothing."""
        if self._late is None:
            return self._decision
        return self._late.compared_decision

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        if self._late is None:
            super().expect_change()
        else:
            self._late.finished().expect_change()

    def grow(self, groups: int) -> None:
        """Starts a clipping history for added parameters."""
        super().grow(groups)
        if self._late is not None:
            self._late.finished().grow(groups)

    def _step(
        self, signals: Signals, found_inf: Tensor | None, divisor: Tensor | None
    ) -> tuple[StepOrder, Decision]:
        """The compiled part: computes the fused kernel's arguments from the signals."""
        new, decision = self.stepping.step(self._state, signals, xp=self._xp)
        if torch.compiler.is_compiling():
            self._write(new)
        else:
            self._state = new
        skip = decision.skip
        if found_inf is not None:
            skip = skip | (found_inf > 0)
        if self.stepping.scales_grads:
            if divisor is None:
                divisor = torch.ones_like(decision.grad_scale)
            divisor = divisor / decision.grad_scale
        lr_scale = None
        if self.stepping.scales_lr:
            lr_scale = decision.lr_scale
        order = StepOrder(
            skip=skip.to(torch.float32),
            grad_scale=decision.grad_scale,
            lr_scale=lr_scale,
            action=decision.action,
            group_scale=decision.group_scale,
            grad_divisor=divisor,
        )
        return order, decision

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
        """As in `HostEngine`. Starts a copy to the host."""
        if self._late is not None:
            return self._late.pending_record(name)
        values = record_numbers(self.state)
        # Two variables for the tensors and two for the copies: see `keep_after_cuda_error`.
        ints = torch.stack(values[:RECORD_INTS])  # bool becomes int32
        int_copy = AsyncCopy(ints)
        floats = torch.stack(values[RECORD_INTS:])
        float_copy = AsyncCopy(floats)

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


LiveEngine: TypeAlias = HostEngine | DeviceEngine
"""The engine of one optimizer, with its state."""


# -- copies to the host ---------------------------------------------------------------------------


def to_host(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Converts small tensors to NumPy. One sync on an accelerator, none on a CPU.

    Args:
        tensors: 0-d and 1-d tensors on any devices, float32 unless all are on the CPU, or None.

    Returns:
        For each tensor a scalar of NumPy (0-d) or a copy (1-d); None for None.
    """
    accelerator: torch.device | None = None
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            accelerator = tensor.device
            break
    numbers: list[Any] = []
    if accelerator is None:
        for tensor in tensors:
            if tensor is None:
                numbers.append(None)
                continue
            # .numpy() shares memory and dispatches nothing (.item() would be a counted sync).
            array = tensor.numpy()
            if array.ndim:
                numbers.append(array.copy())
            else:
                numbers.append(array[()])
        return numbers
    # One copy to the host for all tensors, which is then split.
    parts: list[Tensor] = []
    for tensor in tensors:
        if tensor is not None:
            parts.append(tensor.to(accelerator, torch.float32).reshape(-1))
    flat = torch.cat(parts).cpu().numpy()
    start = 0
    for tensor in tensors:
        if tensor is None:
            numbers.append(None)
            continue
        end = start + tensor.numel()
        numbers.append(flat[start:end].reshape(tuple(tensor.shape))[()])
        start = end
    return numbers


class AsyncCopy:
    """An asynchronous copy of a CUDA tensor to the host; the tensor may be overwritten at once.

    The copy goes to pinned memory on the current stream, and an event marks its end. On other
    devices `read` reads the tensor itself.

    Args:
        tensor: the tensor to copy, on any device.

    Raises:
        AttachError: a CUDA graph is being captured.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event: Any = None
        if not tensor.is_cuda:
            return
        if torch.cuda.is_current_stream_capturing():
            raise AttachError(
                "optimizer.step() is being captured in a CUDA graph, whose replays healcore would "
                "not judge: call step() outside of the graph"
            )
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether `read` would return without waiting, or True if this is unknown."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """The values. Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.cpu().numpy()


@atexit.register
def keep_after_cuda_error() -> None:
    """Keeps all tensors until the process ends if CUDA has failed, as by a device-side assert.

    The driver calls it first when a run ends, and Python calls it at exit.

    torch would abort the process where it frees pinned memory: no traceback, no postmortem. Until
    this call, variables in the frames of the traceback keep the memory; unnamed values do not.
    """
    try:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().query()  # raises after a failure
    except RuntimeError:
        for candidate in gc.get_objects():
            # Not isinstance: that reads `__class__`, which an object may compute.
            if issubclass(type(candidate), Tensor):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(candidate))
