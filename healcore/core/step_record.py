"""`StepRecord`: the values of one step and the decision about it, for the host.

The runtime reads this record of every step. Metrics, events and `replay` show it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.core.array_namespace import SIGNAL_LIMIT, Flag, Float, Int, xp
from healcore.core.decision import Action, Cause, Decision

_MAX_EVIDENCE = 10  # tensors reported per step

REPORT_RATIO = 4.0
"""Ratio to the tensor's norm at the last step without an alarm from which a norm is reported. In
a small transformer the 99th percentile of 4,116 such ratios is 2.1, and the largest is 3.5."""


class Readings(NamedTuple):
    """The measured values behind a cause, as events and alerts show them; each may be NaN or Inf.

    With them a person can see why a detector raised its alarm, for example how far the norm was
    above the threshold. No decision depends on them.
    """

    loss: float
    """Last finite loss; NaN before the first one."""
    grad_norm: float
    """Last finite global norm of the gradients, before clipping; NaN before the first one."""
    threshold: float
    """Norm above which gradients are clipped; 0 without a threshold."""
    z: float
    """z-score of the norm in the clipping rule."""
    z_loss: float
    """Score of the loss-spike detector."""


class SuspectGradient(NamedTuple):
    """A tensor or layer whose gradient was non-finite or unusually large.

    It is evidence for a person who looks for the cause. No decision depends on it. An embedding
    that is alone in the list, for example, points to the data.
    """

    name: str
    """Name in the framework: `layers.3.weight`, `['params']['Dense_0']['kernel']`."""
    grad_norm: float
    """L2 norm in float32 before clipping; may be NaN or Inf."""


class Why(enum.IntEnum):
    """Why a step was not taken. `TAKEN`, which is false, for a step that was.

    A batch that is left out or cannot be read is no step, and has no record.
    """

    TAKEN = 0
    """The optimizer has stepped."""
    POLICY = 1
    """The policy has skipped the step. In observe mode it would have."""
    FROZEN = 2
    """The run repeats the step without an update, see `Envelope.frozen`."""
    STATE_KEPT = 3
    """The training step has kept its old state, including the healing state (JAX)."""
    EXTERNAL = 4
    """The program has left the step out: a GradScaler at an overflow, `externally_skipped`."""
    NOT_DUE = 5
    """No update was due: gradients accumulate, or another optimizer has stepped (JAX)."""


SKIPS = (Why.POLICY, Why.FROZEN, Why.STATE_KEPT)
"""Reasons for which a step counts as skipped. What a loss scale leaves out is counted apart."""


class StepRecord(NamedTuple):
    """One step as judged by one engine: Python values on the host, arrays in a replay.

    The host reads this record of every step. The runtime decides by it, and loggers and events show
    it. The fields up to `lr` are numbers of the engine, which a device packs into one array (see
    `RECORD_FIELDS`). The host adds the fields from `engine` on. The decision is as ordered; in
    observe mode it was not enforced.
    """

    step: Int
    """Steps judged so far; this step counts only if it was judged."""
    onset: Int
    """Judged steps before the first alarm of the last incident; -1 without an incident."""
    incident: Int
    """Number of the last incident, from 1; 0 without an incident."""
    incident_open: Flag
    """Whether an incident is open that has more than skipped non-finite steps."""
    action: Int
    """`Action` flags."""
    cause: Int
    """`Cause` flags."""
    rollback_depth: Int
    """Known-good checkpoint to restore, 1 = newest; 0 without ROLLBACK."""
    why: Int
    """Why the step was not taken, a `Why`; in the numbers of an engine `Decision.skip`."""
    grad_scale: Float
    """Factor on the gradients, 1 = unchanged."""
    lr_scale: Float
    """The learning-rate multiplier."""
    loss: Float
    """Last finite loss; 0 before the first one."""
    grad_norm: Float
    """Last finite global norm of the gradients, before clipping; 0 before the first one."""
    threshold: Float
    """Norm above which gradients are clipped; 0 without a threshold."""
    z: Float
    """z-score of the norm in the clipping rule."""
    z_loss: Float
    """Score of the loss-spike detector."""
    lr: Float | None = None
    """The program's learning rate at the step, or None if it is unknown."""
    engine: str = ""
    """Name of the optimizer in the run's state; each optimizer has its own engine."""
    evidence: tuple[SuspectGradient, ...] = ()
    """The tensors behind a cause, worst first, at most 10. Empty without a cause."""
    rank_signals: tuple[float, float] | None = None
    """(loss, gradient norm) of this rank alone, or None.

    Only a step with a cause has them, and only a run on several ranks."""
    by_optimizer: bool = False
    """Whether the gradients were finite and the optimizer's update was not."""
    loss_ratio: float | None = None
    """Loss over the mean of recent healthy losses, or None if unknown."""
    eval_loss: float | None = None
    """Evaluation loss since the last step, or None."""
    eval_gap: float | None = None
    """`eval_loss` minus the mean of recent healthy losses, or None."""

    @property
    def taken(self) -> bool:
        """Whether the optimizer has stepped; in observe mode whether the policy would let it."""
        return not self.why

    @property
    def judged(self) -> bool:
        """Whether the engine has judged the step: it was taken, skipped by the policy, or frozen.

        Otherwise the loss and the norm are of an earlier step.
        """
        return self.why <= Why.FROZEN

    @property
    def trained_rate(self) -> float | None:
        """The learning rate with which the step has trained: `lr` times `lr_scale`.

        None if the rate is unknown, or if the step has trained nothing: it was not taken, or had a
        rate of 0.
        """
        if self.why or not self.lr:
            return None
        return float(self.lr) * float(self.lr_scale)

    @property
    def decision(self) -> Decision:
        """The ordered decision, without `group_scale`, which may be large."""
        return Decision(
            grad_scale=self.grad_scale,
            skip=not self.taken,
            lr_scale=self.lr_scale,
            action=self.action,
            cause=self.cause,
            rollback_depth=self.rollback_depth,
        )

    @property
    def readings(self) -> Readings:
        """The measured values behind the cause.

        The loss or the norm is NaN if it was bad at this step and has never been finite. The engine
        itself begins with a norm of 0, which would look like a measured one.
        """
        found = Readings(self.loss, self.grad_norm, self.threshold, self.z, self.z_loss)
        if self.cause & Cause.NONFINITE_LOSS:
            found = found._replace(loss=loss_or_nan(self.loss))
        if self.cause & Cause.NONFINITE_GRAD and not self.grad_norm:
            found = found._replace(grad_norm=np.nan)
        return found

    def unjudged(self, why: Why) -> StepRecord:
        """Removes the cause and the orders, for a step that the engine has not judged.

        The state of the engine is still the state of an earlier step, whose orders must not be
        carried out twice.

        Args:
            why: why the step was not taken.
        """
        return self._replace(
            action=Action(0), cause=Cause(0), rollback_depth=0, why=why, grad_scale=1.0
        )


RECORD_FIELDS = StepRecord._fields[: StepRecord._fields.index("engine")]
"""The numbers of a record that an engine has, in packing order: from `step` to `lr`."""
RECORD_INTS = RECORD_FIELDS.index("grad_scale")
"""How many of `RECORD_FIELDS` are int32 or bool in an engine. They come first, and the others are
float32."""
_NO_ACTION, _NO_CAUSE = Action(0), Cause(0)
"""The flags of most steps. They are made once, because `Action(0)` takes as long as five other
numbers of a record."""


def host_record(values: Sequence[Any], engine: str = "") -> StepRecord:
    """Makes a record of Python values, which the host reads for every step.

    Args:
        values: 16 scalars in the order of `RECORD_FIELDS`. The last one is the learning rate, and a
            negative rate is unknown.
        engine: name of the optimizer in the run's state.

    Returns:
        The record. Evidence and comparisons are empty: the host adds them.
    """
    step, onset, incident, is_open, action, cause, depth, skip = map(int, values[:RECORD_INTS])
    why = Why.TAKEN
    if skip:  # every rule has a cause, and a frozen step needs none
        if cause:
            why = Why.POLICY
        else:
            why = Why.FROZEN
    *floats, rate = map(float, values[RECORD_INTS:])
    lr: float | None = None
    if rate >= 0:
        lr = rate
    return StepRecord(
        step,
        onset,
        incident,
        bool(is_open),
        Action(action) if action else _NO_ACTION,
        Cause(cause) if cause else _NO_CAUSE,
        depth,
        why,
        *floats,
        lr=lr,
        engine=engine,
    )


def unpack_record(packed: np.ndarray, engine: str = "") -> StepRecord:
    """Makes a record from the array that a device has copied to the host.

    Args:
        packed: int32 (n,) with n of at least 16: the integers of `RECORD_FIELDS`, then the bits of
            the floats. One array needs one copy instead of sixteen.
        engine: name of the optimizer in the run's state.

    Returns:
        The record of Python values.
    """
    floats = packed[RECORD_INTS : len(RECORD_FIELDS)].view(np.float32).tolist()
    return host_record(packed[:RECORD_INTS].tolist() + floats, engine)


def loss_or_nan(loss: Float) -> Float:
    """The last finite loss of `Telemetry`, or NaN where no loss was finite yet.

    Args:
        loss: float32 of any shape, of any array library.

    Returns:
        The loss in the same library and shape; NaN where it is -0.0.
    """
    return xp.where((loss == 0) & xp.signbit(loss), np.nan, loss)


def is_nan_by_optimizer(cause: Cause, norms: np.ndarray) -> bool:
    """Whether a step with NONFINITE_GRAD had finite gradients, so that its update is not finite.

    Args:
        cause: the causes of the step.
        norms: float (n,): the norm of each gradient, or zeros if the caller measures the norm. A
            norm whose square overflows counts as not finite.
    """
    if not cause & Cause.NONFINITE_GRAD or not norms.size:
        return False
    largest = norms.max()  # NaN if any norm is
    return bool(0 < largest <= SIGNAL_LIMIT)


def suspect_gradients(
    norms: np.ndarray, usual: np.ndarray | None, names: Sequence[str]
) -> tuple[SuspectGradient, ...]:
    """Selects the worst tensors: non-finite gradients first, then by the ratio to the usual norm.

    Args:
        norms: float (n,): the L2 norm of each tensor's gradient at this step.
        usual: float (n,): the norms at the last step without an alarm, 0 where a norm is unknown.
            None without such a step.
        names: the n names of the tensors.

    Returns:
        At most 10 tensors whose norm is not finite, or at least `REPORT_RATIO` times the usual one.
    """
    if usual is None:
        usual = np.zeros_like(norms)
    with np.errstate(all="ignore"):
        ratios = np.where(usual > 0, norms / usual, 0.0)
    ratios[~(norms <= SIGNAL_LIMIT)] = np.inf  # NaN and overflow need no usual norm
    worst = np.argsort(-ratios, kind="stable")[:_MAX_EVIDENCE]
    suspects = []
    for i in worst:
        if ratios[i] >= REPORT_RATIO:
            suspects.append(SuspectGradient(str(names[i]), float(norms[i])))
    return tuple(suspects)
