"""`EngineState`: everything that the engine knows about a run.

The state is a fixed-size pytree of NumPy, JAX or torch arrays. `trees` converts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.core.array_namespace import Array, Flag, Float, Int
from healcore.core.decision import Decision, Telemetry
from healcore.core.engine.config import EngineConfig
from healcore.core.engine.rule import RuleState, init_rule
from healcore.core.step_record import RECORD_FIELDS, loss_or_nan
from healcore.core.trees import map_leaves, zeros

FROZEN = -1.0
"""The limit of the gradient norm while the host freezes all steps."""
UNKNOWN_RATE = -1.0
"""The learning rate of a step whose rate is unknown. No schedule has a negative rate, and a state
has no NaN, so the number cannot be a rate. The multiplier is computed as for a rate of 1."""


class Tally(NamedTuple):
    """Counts since the run began, for loggers and reports. No decision depends on them.

    The counts include steps that a rollback has undone. They are saved with the state, so that a
    resumed run counts on.
    """

    clips: Int
    """Steps whose gradient was clipped."""
    skips: Int
    """Skipped steps."""
    alarms: Int
    """Steps with a cause."""
    rollbacks: Int
    """Rollbacks that the host performed."""
    lr_cuts: Int
    """Cuts of the learning rate."""


class IncidentState(NamedTuple):
    """The open incident, and the last recovery.

    An incident begins at its first alarm and ends after `quiet_steps` steps without an alarm. The
    last recovery stays known afterwards, because a next incident nearby escalates.
    """

    open: Flag
    """Whether an incident is open in which a step may have changed the model."""
    only_skips: Flag
    """Whether an incident is open that has only skipped non-finite steps."""
    number: Int
    """Incidents so far, including the open one."""
    onset: Int
    """Step of the incident's first alarm."""
    quiet: Int
    """Steps since the incident's last alarm."""
    alarms_since_rollback: Int
    """Alarms since the incident's last rollback order; -1 = no order."""
    alarms_since_cut: Int
    """Alarms since the incident's last cut; -1 = no cut."""
    last_onset: Int
    """Onset of the last incident with a rollback order; -1 = no order."""
    escalations: Int
    """Earlier recoveries in the region of the last recovery."""


class BudgetState(NamedTuple):
    """The rollbacks and cuts that a run may still use, see `BudgetConfig`.

    A rollback restores an old state of the engine, except the budget. `Engine.on_rollback` keeps
    the budget of the live run. Otherwise a run could roll back for ever.
    """

    recoveries: Int
    """Rollbacks left."""
    lr_cuts: Int
    """Cuts left."""
    healthy_steps: Int
    """Consecutive steps without an incident since the last refund."""


class LrState(NamedTuple):
    """The multiplier, and its position in hold and ramp. States are saved under these names.

    The rates are absolute where the program passes its learning rate. A schedule that rises again
    by itself then cannot exceed the limit of a cut.
    """

    scale: Float
    """The multiplier in force, in (0, 1]."""
    rate_after_cut: Float
    """Learning rate after the last cut, at which the ramp begins; 0 = never cut."""
    rate_at_cut: Float
    """Learning rate in force before the last cut. Long health raises it; 0 = never cut."""
    peak: Float
    """Highest rate of the schedule since the last cut or sudden fall; 0 = no rate yet."""
    rate: Float
    """The schedule's rate at the last step, or `UNKNOWN_RATE`. The rate is unknown before the first
    step, if the program passes no rate, and if the policy does not read it."""
    hold: Int
    """Remaining steps of the hold."""
    ramp: Int
    """Remaining steps of the ramp."""


class EngineState(NamedTuple):
    """Everything that a decision depends on, except the policy and the step's signals.

    `Engine.init` makes the first state, and each `Engine.step` a new one; no state is changed in
    place. A state is a tree of arrays: NamedTuples and tuples of float32, int32 and bool arrays,
    0-d except for windows and numbers per tensor. Its structure, shapes and dtypes follow from the
    policy and stay the same. So it can be carried through a `lax.scan`, donated, or copied to
    another device. The parts:

        step, change_expected, grace          where the run is
        clip, detectors, rules                what the statistics have learnt of earlier steps
        finite_skip_streak, incident,
        budget, lr                            what is being done about trouble
        norm_limit                            what the host has asked for
        tally, last                           what reports say; decisions depend only on the last
                                              finite loss and norm in it, which replace bad ones

    Every float is finite, and no float is subnormal (`FLUSH`), so that a saved state is
    equal in all frameworks. `Engine.to_dict` saves it.
    """

    step: Int
    """Steps judged."""
    change_expected: Flag
    """Whether the next step opens the grace window."""
    grace: Int
    """Remaining steps of the grace window."""
    clip: Any
    """State of the clipping rule, or None."""
    detectors: tuple[Any, ...]
    """State of each detector, in the policy's order."""
    rules: tuple[RuleState, ...]
    """State of each `[[respond]]` entry, in the policy's order."""
    finite_skip_streak: Int
    """Finite steps skipped in a row; a step without an alarm resets the count."""
    incident: IncidentState
    """The open incident, and the last recovery."""
    budget: BudgetState
    """The rollbacks and cuts that are left."""
    lr: LrState
    """The learning-rate multiplier."""
    norm_limit: Float
    """Largest norm that the host allows, 0 = no limit, or FROZEN."""
    tally: Tally
    """Counts since the run began."""
    last: Telemetry
    """Decision and readings of the last step."""


def neutral(*, groups: int | None = None) -> Decision:
    """Makes the decision that changes nothing.

    Args:
        groups: number of tensors of a per-tensor clipping rule, or None for any other policy.

    Returns:
        The decision as NumPy arrays: factors of 1, no skip, no action and no cause.
    """
    one, zero = np.float32(1), np.int32(0)
    return Decision(
        grad_scale=one,
        skip=np.False_,
        lr_scale=one,
        action=zero,
        cause=zero,
        rollback_depth=zero,
        group_scale=None if groups is None else np.ones((groups,), np.float32),
    )


def init(config: EngineConfig, *, groups: int = 0, batch: tuple[int, ...] = ()) -> EngineState:
    """Makes the state before the first step, see `Engine.init`.

    Args:
        config: the policy.
        groups: number of tensors of a per-tensor clipping rule.
        batch: leading axes of all arrays, for many runs at once.

    Returns:
        The state as NumPy arrays. No two leaves share an array, because JAX may donate them.
    """
    no, zero, none = np.False_, np.int32(0), np.int32(-1)
    clip: Any = None
    group_scales = None
    if config.clip is not None:
        clip = config.clip.init(groups=groups)
        if config.clip.per_tensor:
            group_scales = groups
    state = EngineState(
        step=zero,
        change_expected=no,
        grace=zero,
        clip=clip,
        detectors=tuple(detector.init() for _, detector in config.detectors),
        rules=tuple(init_rule(rule) for rule in config.rules),
        finite_skip_streak=zero,
        incident=zeros(IncidentState)._replace(
            onset=none, alarms_since_rollback=none, alarms_since_cut=none, last_onset=none
        ),
        budget=BudgetState(
            np.int32(config.budget.recoveries), np.int32(config.budget.lr_cuts), zero
        ),
        lr=zeros(LrState)._replace(scale=np.float32(1), rate=np.float32(UNKNOWN_RATE)),
        norm_limit=np.float32(0),
        tally=zeros(Tally),
        last=Telemetry(neutral(groups=group_scales), *[np.float32(0)] * 5)._replace(
            loss=np.float32(-0.0)
        ),
    )
    return map_leaves(lambda leaf: np.broadcast_to(leaf, batch + leaf.shape).copy(), state)


def record_numbers(state: EngineState) -> tuple[Array, ...]:
    """Collects the numbers of the last step, which the host reads.

    Args:
        state: the state after the step, of any array library.

    Returns:
        The arrays in the order of `RECORD_FIELDS`, unchanged and without a copy to the host.
    """
    incident, last = state.incident, state.last
    decision = last.decision
    return (
        state.step,
        incident.onset,
        incident.number,
        incident.open,
        decision.action,
        decision.cause,
        decision.rollback_depth,
        decision.skip,
        decision.grad_scale,
        decision.lr_scale,
        last.loss,
        last.grad_norm,
        last.threshold,
        last.z,
        last.z_loss,
        state.lr.rate,
    )


_METRIC_NAMES = {"why": "skip", "step": "steps", "incident": "incidents"}
_NO_METRICS = ("onset", "incident_open", "rollback_depth", "lr")


def metrics(record: Sequence[Array], tally: Tally) -> dict[str, Array]:
    """Names the numbers of the last step for a logger, `heal/...`.

    Counts include steps that a rollback has undone. `heal/loss` and `heal/grad_norm` are the last
    finite values; the loss is NaN before the first one. `heal/threshold` is 0 without a threshold.
    `heal/cause` and `heal/action` are flags. In observe mode the numbers say what healing would
    have done.

    Args:
        record: the numbers of the step, as `record_numbers` collects them.
        tally: the counts after the step.

    Returns:
        `heal/...` -> a number of the arrays' library: 0-d, or with the leading axes of the arrays.
    """
    numbers = dict(zip(RECORD_FIELDS, record, strict=True)) | tally._asdict()
    numbers["loss"] = loss_or_nan(numbers["loss"])
    return {
        f"heal/{_METRIC_NAMES.get(name, name)}": number
        for name, number in numbers.items()
        if name not in _NO_METRICS
    }
