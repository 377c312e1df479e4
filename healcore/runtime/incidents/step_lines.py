"""`StepLines`: console lines about unhealthy steps, for every driver and trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause, names
from healcore.events.schema import flag_names, readings_text

if TYPE_CHECKING:  # `healcore.torch.attach` uses this module without the rest of the runtime
    from healcore.core.engine import Engine
    from healcore.runtime.host_policy import HostPolicy
    from healcore.runtime.incidents.delayed_reader import StepResult
    from healcore.runtime.incidents.ledger import IncidentRecord
    from healcore.runtime.run_log import RunLog

FROM_START = 100
"""Steps after which a run ends that has had no finite step."""
IN_A_ROW = 1_000
"""Consecutive steps without a finite step after which any other run ends."""
_ORDERS = Action.ROLLBACK | Action.STOP | Action.CUT_LR


class StepLines:
    """Logs lines about unhealthy steps.

    - Every cut of the learning rate.
    - Incidents: the first ten, then each power of two.
    - Skipped steps, and alarms outside of incidents (such as a clipped outlier): the first, then
      each power of ten.

    `Recovery` logs rollbacks and stops.
    """

    def __init__(
        self, policy: HostPolicy, log: RunLog, learning_rate: Callable[[], float | None]
    ) -> None:
        self._policy = policy
        self._learning_rate = learning_rate
        self._log = log
        self._alarms_outside = 0

    def add(
        self, step: StepResult, incident: IncidentRecord | None, *, is_new: bool, skips: int
    ) -> None:
        """Logs a line about a step if it is due. `skips` counts the run's skips up to this step."""
        if not any(each.cause or each.action or each.skip for each in step.records):
            return
        skips_before = skips - sum(bool(each.skip) for each in step.records)
        outside_before = self._alarms_outside
        record = max(step.records, key=_weight)
        if incident is None and record.cause:
            self._alarms_outside += 1
        if (
            (record.action & Action.CUT_LR and not self._policy.observes)
            or (incident is not None and is_new and is_logged(incident.number))
            or passes_power_of_ten(skips_before, skips)
            or passes_power_of_ten(outside_before, self._alarms_outside)
        ):
            number = f"incident {incident.number}: " if incident is not None else ""
            self._log.warning(
                f"step {step.index}: {number}{incident_text(record, self._rate())}"
                f"{self._outcome_text(record, skips)}"
            )

    def _rate(self) -> float | None:
        try:
            return self._learning_rate()
        except RuntimeError:  # a step in JAX that failed may have donated the state
            return None

    def _outcome_text(self, record: StepRecord, skips: int) -> str:
        done = enforced_text(record, self._policy.engine)
        if self._policy.observes:
            return done
        if record.skip and skips > 1:
            done += f", {skips} of the run"
        if record.action & Action.CUT_LR:
            done += f"; learning rate × {record.lr_scale:g}"
        return done


def incident_text(record: StepRecord, learning_rate: float | None) -> str:
    """Causes, loss, norm and rate of a step, as a clause; the rate is without the multiplier."""
    rate = "" if learning_rate is None else f"learning rate {learning_rate:.4g}"
    numbers = filter(None, (readings_text(record.readings, names(record.cause)), rate))
    return "; ".join(filter(None, (cause_text(record.cause), ", ".join(numbers))))


def nonfinite_row_text(
    record: StepRecord, row: int, weights: Sequence[str], from_start: bool
) -> str:
    """The sentence about a run of which `row` consecutive steps were not finite.

    `weights` has the names of the parameters with NaN or Inf, in their order. A skip changes no
    parameter, so a run without a finite step has the parameters that it was started with.
    """
    which = "first" if from_start else "last"
    text = f"none of the {which} {row:,} steps was finite, so nothing was trained"
    since = " since the start" if from_start else ""
    if weights:
        loaded = ", because they were loaded so" if from_start else ""
        return (
            f"{text}: the weights are NaN or Inf{since}{loaded}; the first tensor is {weights[0]}"
        )
    if not record.taken:
        return f"{text}: the training step has kept its old state{since}"
    named = [each.name for each in record.evidence if not math.isfinite(each.grad_norm)]
    first = f"; the first tensor is the gradient of {named[0]}" if named else ""
    what = "loss" if record.cause & Cause.NONFINITE_LOSS else "gradient"
    return f"{text}: the {what} is NaN or Inf{since}{first}"


def enforced_text(record: StepRecord, engine: Engine) -> str:
    """Intervention within the step, as a clause, or an empty string for an order to the loop."""
    if engine.mode == "observe":
        orders = " and ".join(names(record.action & _ORDERS))
        ordered = f"; {orders} ordered" if orders else ""
        return f"{ordered}; nothing is changed, the policy observes"
    if record.skip:
        return "; skipped"
    if record.grad_scale < 1:
        return f"; gradients × {record.grad_scale:.3g}"
    clips_groups = engine.config.clip is not None and engine.config.clip[0] == "adagc"
    return "" if clips_groups or record.action & _ORDERS else "; nothing is changed"


def cause_text(cause: Cause) -> str:
    """Names of causes, as a clause."""
    return flag_names(names(cause))


def is_logged(number: int) -> bool:
    """Whether occurrence `number` has a line: the first ten, then each power of two."""
    return number <= 10 or number & (number - 1) == 0


def passes_power_of_ten(before: int, now: int) -> bool:
    """Whether a count has just reached 1, 10, 100, ..."""
    return now > before and (not before or len(str(now)) > len(str(before)))


def _weight(record: StepRecord) -> tuple[bool, bool, bool]:
    """Sort key: with several optimizers, the line is about the record with the largest key."""
    return bool(record.action & Action.CUT_LR), bool(record.skip), record.cause != 0
