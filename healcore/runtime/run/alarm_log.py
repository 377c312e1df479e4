"""`AlarmLog`: the events and console lines of the alarms of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from healcore.console import is_logged, passes_power_of_ten
from healcore.core.decision import Action, StepRecord
from healcore.events.schema import sentence
from healcore.history.run import MOST_ALARMS
from healcore.runtime.faults.failures import Severity, failures_of
from healcore.runtime.run.judged_record import JudgedRecord, batch_fields
from healcore.runtime.story import diagnosis

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class AlarmLog:
    """Writes the event of each alarm, and a console line for the alarms that a person should see.

    A run may have an alarm at every step for hours. So lines become rarer with their number, and
    after `MOST_ALARMS` alarms so do events. The metrics file has all alarms. Otherwise the first
    alarms would be lost among thousands of equal lines.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._outside = 0  # alarms outside of incidents
        self._explained: set[str] = set()
        """Diagnoses on the console so far: a line has each of them once."""

    def has_line(self, lead: JudgedRecord, *, begins: bool) -> bool:
        """Whether the step has a console line, which is about one of its records.

        - Every cut of the learning rate.
        - Incidents: the first ten, then each power of two.
        - Skipped steps, and alarms outside of incidents (such as a clipped outlier): the first,
          then each power of ten.

        For alerts outside of incidents see `Alerts.count_and_decide_line`.

        Args:
            lead: the record that the line would be about.
            begins: whether the step is the first step of its incident.
        """
        if lead.record.action & Action.CUT_LR and not self.run.policy.observes:
            return True
        if lead.incident is not None and begins and is_logged(lead.incident.number):
            return True
        alarms = 0
        has_skip = False
        for record in lead.step.records:
            alarms += record.cause != 0
            has_skip = has_skip or bool(record.skip)
        skips = self.run.ledger.skips
        if passes_power_of_ten(skips - has_skip, skips):
            return True
        if lead.incident is not None:
            return False
        return passes_power_of_ten(self._outside, self._outside + alarms)

    def write(self, judged: JudgedRecord, *, has_line: bool) -> None:
        """Writes the event of an alarm, and its line.

        Args:
            judged: a record with a cause.
            has_line: whether the record has the line of its step.
        """
        step, record, incident = judged.step, judged.record, judged.incident
        policy = self.run.policy
        if incident is None:
            self._outside += 1
            number = self._outside
            if number == MOST_ALARMS + 1:
                self.run.log.info(
                    f"step {step.index}: more than {MOST_ALARMS} alarms outside of incidents: from "
                    "now on only those with an alert or a line have an event; the metrics file has "
                    "them all"
                )
        else:
            number = incident.alarms
        if number > MOST_ALARMS and not has_line and not judged.alert:
            return
        rate = None
        if has_line:
            rate = self._rate_of(record)
        explanation = failures_of(record.cause)[0].diagnosis
        by_optimizer = None
        if record.by_optimizer:
            numbers: list[str] = []
            with suppress(RuntimeError):  # as in `_rate_of`
                numbers = self.run.driver.suspect_numbers()
            by_optimizer = diagnosis.by_optimizer_text(numbers)
            explanation = by_optimizer
        skips = None
        if record.skip and not policy.observes:
            skips = self.run.ledger.skips
        grad_scale = None
        if not policy.engine.per_tensor:
            grad_scale = record.grad_scale
        event = self.run.log.event(
            "alarm",
            step=step.index,
            engine=record.engine,
            incident=judged.number,
            cause=record.cause,
            skip=record.skip,
            skips=skips,
            grad_scale=grad_scale,
            lr=rate,
            lr_scale=record.lr_scale,
            action=record.action,
            readings=record.readings,
            evidence=record.evidence,
            diagnosis=by_optimizer,
            observed=policy.observes,
            **batch_fields(step),
        )
        if not has_line:
            return
        which = ""
        if incident is not None:
            which = f"incident {incident.number}: "
        line = f"step {step.index}: {which}{sentence(event)}"
        if failures_of(record.cause)[0].severity is not Severity.ERROR:
            self.run.log.warning(line)
            return
        if explanation not in self._explained:
            self._explained.add(explanation)
            line += f". {explanation}"
        self.run.log.error(line)

    def _rate_of(self, record: StepRecord) -> float | None:
        """The learning rate of a step, or None if it is unknown.

        The program may have set another rate since that step, for example the usual rate after a
        step at a wrong one.
        """
        if record.lr not in (0.0, 1.0):
            return float(record.lr)
        with suppress(RuntimeError):  # a step in JAX that failed may have donated the state
            return self.run.driver.trained_rates().get(record.engine)
        return None
