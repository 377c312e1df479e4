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

from healcore.core.clipping import EDGES
from healcore.core.decision import RECORD_INTS, Action, Decision, StepRecord, host_record
from healcore.core.engine import Engine, EngineState, StateError
from healcore.core.engine.state import record_numbers
from healcore.core.errors import AttachError
from healcore.core.numerics import (
    PRODUCT_LIMIT,
    SIGNAL_LIMIT,
    as_written,
    leaves,
    map_leaves,
)
from healcore.core.signals import Signals
from healcore.core.tape import to_program

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
    """The decision to enforce at one step: Python numbers, or 0-d tensors on the device."""

    skip: Any
    """Whether to skip, by order of the policy or of a GradScaler: a bool, or float32 0 or 1."""
    grad_scale: Any
    lr_scale: Any
    """None if the policy cannot scale the rate at this step."""
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
        skip, scale, lr_scale, action, groups = to_host(self[:5])
        lr_scale = 1.0 if lr_scale is None else float(lr_scale)
        host = StepOrder(bool(skip > 0), float(scale), lr_scale, int(action), groups)
        return host._replace(clip_factor=self.clip_factor)


def is_cut(action: int, skip: bool) -> bool:
    """Whether a step with these flags of `Action` cuts the learning rate, and is not skipped."""
    return bool(action & _CUT_LR) and not skip


class _StatefulEngine:
    """Base of both engines.

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

        The last one, or the one of a fixed number of steps ago if steps are judged late. So the
        ranks compare the decisions of the same step.
        """
        return self._decision

    def _to_numpy(self) -> EngineState:
        return map_leaves(lambda x: x.cpu().numpy() if isinstance(x, Tensor) else x, self.state)

    def metrics(self) -> dict[str, Tensor]:
        """Named 0-d tensors; copies, because a compiled step writes the state in place.

        Waits for the device if steps are judged late.
        """
        found = self.engine.metrics(self.state)
        return {name: torch.as_tensor(value).clone() for name, value in found.items()}

    def expect_change(self) -> None:
        """Opens the grace window at the next step."""
        self._state = self.engine.expect_change(self._state, xp=self._xp)

    def grow(self, groups: int) -> None:
        """Starts a clipping history for added parameters."""
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
        self._start(saved)


class HostEngine(_StatefulEngine):
    """An engine in NumPy scalars. A step reads the signals, in one sync on an accelerator."""

    name = "host"

    def __init__(self, engine: Engine, groups: int) -> None:
        super().__init__(engine, groups, xp=np, place=lambda leaf: leaf[()])  # 0-d: scalars
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        """Engine, number of parameters and the signals' types -> the recorded step."""

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> StepOrder:
        """Judges one step from 0-d float32 tensors.

        `found_inf` is a GradScaler's flag, above 0 to skip the step, and `divisor` its scale if the
        gradients still contain the scale.
        """
        *values, overflow = to_host((*signals, found_inf))
        decision = self.judge(Signals._make(values))
        groups = decision.group_scale
        return StepOrder(
            skip=bool(decision.skip or (overflow or 0) > 0),
            grad_scale=float(decision.grad_scale),
            lr_scale=float(decision.lr_scale),
            action=int(decision.action),
            group_scale=None if groups is None else np.asarray(groups),
        )

    def judge(self, signals: Signals) -> Decision:
        """Judges one step from numbers of NumPy."""
        ignored = (signals.externally_skipped or 0) > 0
        signals = signals._replace(externally_skipped=np.True_ if ignored else None)
        key = self.stepping, self.groups, *map(type, signals)
        with np.errstate(all="ignore"):  # the core discards invalid values afterwards
            if key not in self._programs:
                self._programs[key] = to_program(self.stepping.step, self._state, signals)
            self._state, decision = self._programs[key](self._state, signals)
        self._decision = decision
        return decision

    def pending_record(self, name: str = "") -> PendingRecord:
        """A function that reads the last step's record. `name` is the optimizer's name."""
        state = self._state
        return lambda: host_record(record_numbers(state), name)


class LateStep:
    """A step that was taken and is judged later.

    Attributes:
        state: the engine's state after it, None until it is judged.
        decision: the engine's decision, None until it is judged.
    """

    def __init__(self, signals: Signals, numbers: Tensor, present: Sequence[str]) -> None:
        """`numbers` are float32 (n,): the values of the signals that are `present`, in order."""
        self._nothing = Signals(*[None] * len(signals))
        self._numbers, self._present = AsyncCopy(numbers), present
        self.state: EngineState | None = None
        self.decision: Decision | None = None

    def signals(self) -> Signals:
        """The signals, in numbers of NumPy. Waits for their copy."""
        return self._nothing._replace(**dict(zip(self._present, self._numbers.read(), strict=True)))


class _Norm(NamedTuple):
    """What a fixed clip reads of a step."""

    grad_norm: Tensor


class LateJudge:
    """Judges the steps of an accelerator on the host, after they were taken.

        device    norm, finite test, copy to the host, fused kernel | step n + 1 ...
        host      dispatches step n                                 | judges step n - RECORD_LAG

    Each step is judged by the same function of the same float32 numbers as in the step, so that
    nothing but the time differs. For engines with `tests_only_finite`.
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
        """Tests whether a step is finite, and keeps its signals. Reads nothing on the host."""
        present = [name for name, value in signals._asdict().items() if value is not None]
        parts = [getattr(signals, name) for name in present]
        numbers = torch.stack([each.to(torch.float32) for each in parts])
        step = LateStep(signals, numbers, present)
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
            divisor = (self._one if divisor is None else divisor) / scale
        return StepOrder(skip, scale, None, self._no_action, grad_divisor=divisor)

    def _test(self, found: Tensor, numbers: Tensor, present: Sequence[str]) -> None:
        """Sets `found` to 1 for a step with NaN or Inf."""
        engine = self.host.stepping
        tested = {"grad_norm", "loss"} if engine.skips_bad_loss else {"grad_norm"}
        places = [place for place, name in enumerate(present) if name in tested]
        # One kernel. It multiplies the numbers by 1, which changes no bit.
        parts = [numbers[places[0] : places[-1] + 1]] if places else []
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            parts, found, self._one
        )

    def _judge(self, *, lag: int = 0) -> None:
        """Judges the waiting steps but the newest `lag`."""
        while len(self._waiting) > lag:
            step = self._waiting.popleft()
            self.host.judge(step.signals())
            step.state, step.decision = self.host.state, self.host.decision

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
        """The engine after all steps. Waits for the device."""
        self._judge()
        return self.host

    def pending_record(self, name: str) -> PendingRecord:
        """As in `HostEngine`."""
        step = self._recent[-1]

        def read() -> StepRecord:
            while step.state is None:
                self._judge(lag=len(self._waiting) - 1)
            return host_record(record_numbers(step.state), name)

        return read


class DeviceEngine(_StatefulEngine):
    """An engine for steps on `device`. A step reads nothing on the host.

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
        self._compiled_step = _compiled(self._step) if compile else None

    def step(
        self, signals: Signals, found_inf: Tensor | None = None, divisor: Tensor | None = None
    ) -> StepOrder:
        """As in `HostEngine`."""
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
                self.compiled, self._compiled_step = False, None
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
        return self._state if self._late is None else self._late.finished().state

    @property
    def decision(self) -> Decision | None:
        """As `state`."""
        return self._decision if self._late is None else self._late.finished().decision

    @property
    def compared_decision(self) -> Decision | None:
        """See the base class."""
        return self._decision if self._late is None else self._late.compared_decision

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
        skip = decision.skip if found_inf is None else decision.skip | (found_inf > 0)
        scale = decision.grad_scale
        if self.stepping.scales_grads:
            divisor = (torch.ones_like(scale) if divisor is None else divisor) / scale
        return StepOrder(
            skip=skip.to(torch.float32),
            grad_scale=scale,
            lr_scale=decision.lr_scale if self.stepping.scales_lr else None,
            action=decision.action,
            group_scale=decision.group_scale,
            grad_divisor=divisor,
        ), decision

    def _write(self, new: EngineState) -> None:
        """Writes a new state in place, so that the graph has the same inputs at every step."""
        before = leaves(self._state)
        pairs = zip(before, leaves(new), strict=True)
        # A leaf that has moved in the tree is cloned first, because it may be overwritten.
        for old, leaf in [
            (old, leaf.clone() if any(leaf is each for each in before) else leaf)
            for old, leaf in pairs
            if leaf is not old
        ]:
            old.copy_(leaf)

    def pending_record(self, name: str = "") -> PendingRecord:
        """As in `HostEngine`. Starts a copy to the host."""
        if self._late is not None:
            return self._late.pending_record(name)
        values = record_numbers(self.state)
        ints = torch.stack(values[:RECORD_INTS])  # bool becomes int32
        copies = [AsyncCopy(ints)]  # a variable: see `keep_after_cuda_error`
        copies.append(AsyncCopy(torch.stack(values[RECORD_INTS:])))
        return lambda: host_record([n for c in copies for n in c.read().tolist()], name)


def _compiled(step: Any) -> Any:
    """`step` compiled as one graph, with exact arithmetic if this torch has the options."""
    from torch._inductor import list_options

    options: dict[str, Any] = {n: v for n, v in _EXACT.items() if n in {*list_options()}}
    return torch.compile(step, fullgraph=True, dynamic=False, options=options)


LiveEngine: TypeAlias = HostEngine | DeviceEngine
"""The engine of one optimizer, with its state."""


# -- the array namespace of the core in torch -----------------------------------------------------


def _sqrt(x: Tensor) -> Tensor:
    """Square root, correctly rounded in float32 as in NumPy and XLA.

    Computed in float64: its 53 bits exceed 2 * 24 + 2, so rounding twice equals rounding once. On a
    CPU `torch.sqrt` in float32 (MKL's VML) differs by one ulp in 17 % of cases.
    """
    if x.dtype == torch.float32 and x.device.type != "mps":  # MPS has no float64
        return torch.sqrt(x.to(torch.float64)).to(torch.float32)
    return torch.sqrt(x)


_KINDS = {float: (torch.float32,), int: (torch.float32, torch.int32)}
"""Type of a Python number -> dtypes of a tensor with which the number has the same dtype."""


class Namespace:
    """Array functions of the core on one device, each in one or two torch calls.

    All trace under ``torch.compile(fullgraph=True)``. Rejected: array-api-compat, which breaks the
    graph in Dynamo (measured) and keeps torch's inexact `sqrt`. The core's only table, and each
    number, is copied to the device once.
    """

    float32, int32, bool = torch.float32, torch.int32, torch.bool
    abs, clip, minimum, maximum = torch.abs, torch.clamp, torch.clamp_max, torch.clamp_min
    sum, cumsum = torch.sum, torch.cumsum
    astype, sqrt = staticmethod(Tensor.to), staticmethod(_sqrt)
    divides_ints = True  # float32 / int32 is float32, unlike in NumPy

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edges = torch.as_tensor(EDGES).to(device)
        self._numbers: dict[tuple[Any, torch.dtype, torch.device], Tensor] = {}

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        """`torch.where`; a Python number becomes a tensor once, and not at every call."""
        if not isinstance(y, Tensor):
            y = self._number(y, x)
        elif not isinstance(x, Tensor):
            x = self._number(x, y)
        return torch.where(condition, x, y)

    def _number(self, number: Any, like: Any) -> Any:
        """`number` as a 0-d tensor of the dtype of `like`, or unchanged where that is not safe."""
        fits = isinstance(like, Tensor) and like.dtype in _KINDS.get(type(number), ())
        return self._constant(number, like.dtype, like.device) if fits else number

    def _constant(self, number: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """A 0-d tensor; in a compiled step the number itself."""
        if torch.compiler.is_compiling():
            return number
        key = number, dtype, device
        if key not in self._numbers:
            self._numbers[key] = torch.full((), number, dtype=dtype, device=device)
        return self._numbers[key]

    @staticmethod
    def without_small(x: Tensor, limit: float) -> Tensor:
        """See `numerics`."""
        return torch.nn.functional.hardshrink(x, limit)

    @staticmethod
    def rounded_product(x: Any, y: Any) -> Tensor:
        """See `numerics`. Only a compiler fuses a product with an addition."""
        return torch.clamp_max(x * y, PRODUCT_LIMIT) if torch.compiler.is_compiling() else x * y

    def never(self, like: Tensor) -> Tensor:
        """False in the shape of `like`."""
        if like.ndim or torch.compiler.is_compiling():
            return like != like
        return self._constant(False, torch.bool, like.device)

    def flag(self, condition: Tensor, flags: int) -> Tensor:
        """See `numerics.flag`. Of two tensors, a bool and an int32, the product is int32."""
        bit = condition.to(torch.int32) if torch.compiler.is_compiling() else condition
        return bit * self._constant(flags, torch.int32, condition.device)

    def reciprocal(self, x: Tensor) -> Tensor:
        """1 / x in float32."""
        x = x.to(torch.float32) if torch.compiler.is_compiling() else x
        return self._constant(1.0, torch.float32, x.device) / x

    def quotient(self, x: Tensor, y: Any) -> Tensor:
        """See `numerics`. torch divides exactly by a tensor, but not by a Python number."""
        divisor = self._number(y, x)
        return x / (divisor if isinstance(divisor, Tensor) else torch.full_like(x, divisor))

    def arange(self, n: int) -> Tensor:
        """0, 1, ... n - 1 on the device."""
        return torch.arange(n, device=self.device)

    def asarray(self, x: Any) -> Tensor:
        """The core's only table, `EDGES`, on the device."""
        del x
        return self._edges


# -- copies to the host ---------------------------------------------------------------------------


def to_host(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Converts 0-d and 1-d float32 tensors to NumPy. One sync on an accelerator, none on a CPU."""
    present = [t for t in tensors if t is not None]
    devices = [t.device for t in present if not t.is_cpu]
    if not devices:
        # .numpy() shares memory and dispatches nothing (.item() would be a counted sync).
        arrays = [None if t is None else t.numpy() for t in tensors]
        return [a.copy() if a is not None and a.ndim else a and a[()] for a in arrays]
    flat = torch.cat([t.to(devices[0], torch.float32).reshape(-1) for t in present]).cpu().numpy()
    parts = iter(np.split(flat, np.cumsum([t.numel() for t in present])[:-1]))
    return [None if t is None else next(parts).reshape(tuple(t.shape))[()] for t in tensors]


class AsyncCopy:
    """An asynchronous copy of a CUDA tensor to the host; the tensor may be overwritten at once.

    On other devices `read` reads the tensor itself.
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

    torch would abort the process where it frees pinned memory: no traceback, no postmortem. Until
    this call, variables in the frames of the traceback keep the memory; unnamed values do not.
    """
    try:
        _ = torch.cuda.is_initialized() and torch.cuda.current_stream().query()
    except RuntimeError:
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
