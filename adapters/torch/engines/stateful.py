"""`StatefulEngine`: what the engine in NumPy and the engine on a device have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from healcore.core.decision import Action, Decision
from healcore.core.engine import Engine, EngineState, StateError
from healcore.core.numerics import shortest_decimal
from healcore.core.step_record import StepRecord
from healcore.core.trees import map_leaves

_CUT_LR = int(Action.CUT_LR)  # operations on an IntFlag take microseconds

PendingRecord: TypeAlias = Callable[[], StepRecord]
"""Reads the record of a judged step. Waits until the record is on the host."""


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
            # `.numpy()` shares memory and dispatches nothing. `.item()` would dispatch an
            # operation, which the tests count as a sync.
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


class EnforcedDecision(NamedTuple):
    """The decision to enforce at one step: Python numbers, or 0-d tensors on the device.

    A `Decision` of the core says what the policy wants. An `EnforcedDecision` adds what only the
    adapter knows: the GradScaler's overflow, and the scale that the gradients still contain. Its
    numbers are either all on the host or all on the device. The `Enforcer` looks at `skip`: a
    tensor means on the device. Only `clip_factor` is a tensor in both cases.
    """

    skip: Any
    """Whether to skip, because the policy or a GradScaler says so: a bool, or a float32 tensor of 0
    or 1."""
    grad_scale: Any
    """Factor of all gradients: a float, or a float32 tensor. 1 changes nothing."""
    lr_scale: Any
    """Factor of the learning rate: a float, or a float32 tensor. None on the device if the policy
    cannot scale the rate at this step."""
    action: Any
    """Flags of `Action`: an int, or an int32 tensor."""
    group_scale: Any = None
    """One factor per tensor, float32 (n,): an array of NumPy or a tensor, or None."""
    grad_divisor: Tensor | None = None
    """float32: divisor of the gradients in the fused kernel, or None without a division."""
    clip_factor: Tensor | None = None
    """Factor of `torch.nn.utils.clip_grad_norm_`, at most 1: applied in place of `grad_scale` and
    `grad_divisor`, from which it differs in the last bits. None except for a fixed clip."""

    def to_host(self) -> EnforcedDecision:
        """The decision as Python numbers: one sync on an accelerator, none on a CPU."""
        skip, grad_scale, lr_scale, action, group_scale = to_host(self[:5])
        if lr_scale is None:
            lr_scale = 1.0
        return EnforcedDecision(
            skip=bool(skip > 0),
            grad_scale=float(grad_scale),
            lr_scale=float(lr_scale),
            action=int(action),
            group_scale=group_scale,
            clip_factor=self.clip_factor,
        )


def is_cut(action: int, skip: bool) -> bool:
    """Whether a step cuts the learning rate, and is not skipped.

    The moments of the optimizer are reset at such a step, if the policy says so.

    Args:
        action: flags of `Action`.
        skip: whether the step is skipped.
    """
    return bool(action & _CUT_LR) and not skip


class StatefulEngine:
    """Base of both engines: the policy's pure engine, and the state that it has reached.

    A subclass adds `step`, which judges a step and moves the state on, and `pending_record`.

    Args:
        engine: the policy's engine.
        tensors: number of tensors, the parameters of the optimizer.
        xp: array namespace of the core.
        to_leaf: makes a leaf of the state from a NumPy array.

    Attributes:
        engine: the policy's engine.
        step_engine: the engine that makes the steps, see `Engine.specialised_for`.
        tensors: number of tensors, the parameters of the optimizer.
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
        self, engine: Engine, tensors: int, *, xp: Any, to_leaf: Callable[[np.ndarray], Any]
    ) -> None:
        self.engine = engine
        self.tensors = tensors
        self._xp = xp
        self._to_leaf = to_leaf
        self.start(engine.init(groups=tensors))

    def start(self, state: EngineState) -> None:
        """Continues from a state, in place of the state that was reached.

        Args:
            state: a state with leaves of NumPy, which fits the engine and the number of parameters.
        """
        self.step_engine = self.engine.specialised_for(state)
        is_alone = self.engine.mode != "observe" and not self.step_engine.limits_norm
        self.max_norm = None
        if self.engine.clips_at_fixed_norm and is_alone:
            self.max_norm = shortest_decimal(np.float32(self.engine.config.clip.max_norm))
        self._state: EngineState = map_leaves(self._to_leaf, state)
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
        """The decision that several ranks compare at the next step. Does not wait.

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

    def grow(self, tensors: int) -> None:
        """Starts a clipping history for added parameters.

        The state of all other detectors, and the histories of the first parameters, stay.

        Args:
            tensors: the new number of tensors, larger than before.
        """
        self.tensors = tensors

        def extended(old: Any, new: Any) -> Any:
            if old.shape != new.shape:
                new[: old.shape[0]] = old
                return new
            return old

        new = map_leaves(self._to_leaf, self.engine.init(groups=tensors))
        self._state = map_leaves(extended, self._state, new)

    def to_dict(self) -> dict[str, Any]:
        """The framework-neutral state, which the engines of all frameworks read.

        A sync on an accelerator. A checkpoint holds the result, so that a run may continue on
        another kind of device.
        """
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
        if self.engine.per_tensor and data["groups"] != self.tensors:
            raise StateError(
                f"the saved state has {data['groups']} parameters, this optimizer has "
                f"{self.tensors}: per-tensor clipping has a history for each; attach to the same "
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
        self.start(saved)
