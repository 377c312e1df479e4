"""`JudgedRecord`: a record of a step with the incident that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.core.decision import Action, Cause
from healcore.core.step_record import StepRecord
from healcore.runtime.run.dispatch_queue import StepResult

if TYPE_CHECKING:
    from healcore.runtime.run.record.ledger import IncidentRecord

# Flags of an int are faster than flags of an enum.
_CUT_LR = int(Action.CUT_LR)
_ALERT = int(Action.ALERT)


class JudgedRecord(NamedTuple):
    """A record of a step that has a cause or an action, and the incident of the step.

    Alarms and alerts are logged from these objects: an event needs the record and also the step and
    the incident that it belongs to.
    """

    result: StepResult
    """The step, with the records of all optimizers."""
    record: StepRecord
    """The record of one optimizer."""
    incident: IncidentRecord | None
    """The incident that the step belongs to, or None for an alarm outside of incidents."""
    alert: Cause = Cause(0)
    """Causes of an alert, or 0 without one."""

    @property
    def number(self) -> int:
        """Number of the incident, or 0 without one: the field `incident` of events."""
        if self.incident is None:
            return 0
        return self.incident.number

    def priority(self) -> tuple[bool, bool, bool, bool]:
        """Sort key: with several optimizers, the line is about the record with the largest key.

        A cut of the learning rate matters most, then a skipped step, then an alert, then any other
        cause.

        Returns:
            Four flags in the order of their importance.
        """
        action = int(self.record.action)
        cuts = bool(action & _CUT_LR)
        alerts = bool(action & _ALERT)
        return cuts, not self.record.taken, alerts, self.record.cause != 0


def batch_fields(result: StepResult) -> dict[str, Any]:
    """The fields of an event about the batches of a step.

    Args:
        result: the step. Its loaders may give the row numbers of a batch; most give none.
    """
    batches: list[list[Any]] = []
    rows: list[Any] = []
    for batch in result.batches:
        batches.append(list(batch))
        if batch.rows:
            rows.append(batch.rows)
    return {"batches": batches, "rows": rows or None}
