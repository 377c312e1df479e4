"""`IncidentLog`: logs incidents and likely mistakes, for `attach` without a Healer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

from healcore import console
from healcore.core.engine import Engine
from healcore.core.step_record import StepRecord
from healcore.core.verdict import NONFINITE, Action, names
from healcore.events.schema import alarm_text
from healcore.runtime.incidents.steps import (
    FROM_START,
    is_logged,
    nonfinite_row_text,
    passes_power_of_ten,
)
from healcore.torch.loop_mistakes import NormCeiling

WITHOUT_LOSS = 20
"""Steps without a loss after which a warning is logged."""

_ANSWERS = {
    Action.ROLLBACK: "restore a checkpoint and call heal.on_rollback()",
    Action.STOP: "end the run",
}
"""Order -> what a loop without a Healer has to do."""


class IncidentLog:
    """Logs one line per incident, and one line for each call that the loop lacks.

    Each line names the optimizer's class.

    Args:
        name: the optimizer's class.
        engine: the policy's engine.
        learning_rate: returns the current rate, or None.
        resets_moments: whether a cut of the learning rate resets the moments too.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        learning_rate: Callable[[], float | None],
        resets_moments: bool,
    ) -> None:
        self._name = name
        self._engine = engine
        self._learning_rate = learning_rate
        self.resets_moments = resets_moments
        self.enabled = True
        """Whether this rank logs. Only the first of the ranks that decide together logs."""
        self.console: console.Console = "auto"
        self.take: Callable[[StepRecord, Action], Action] = lambda record, action: action
        """Receives the orders of a step. Returns the orders that the loop does not carry out."""
        self._steps = self._nonfinite_row = self._incident = 0
        self._last_step = -1
        """Number of the last record's step."""
        self._logged: set[str] = set()
        self._ceiling = NormCeiling()

    def stepped(self, *, has_seen_loss: bool) -> None:
        """Call it after a step is judged."""
        self._steps += 1
        if self._steps == WITHOUT_LOSS and not has_seen_loss and "loss" in self._engine.needs:
            self.write_once(
                "no loss",
                f"no loss has been observed in {WITHOUT_LOSS} steps: call heal.observe(loss) "
                "before each optimizer.step(); detectors that read it are inactive",
            )

    def add(self, records: Iterable[StepRecord]) -> None:
        """Logs the records of steps, oldest first."""
        for record in records:
            # A step that a GradScaler skips has the record of the step before.
            if record.step != self._last_step:
                if self._last_step < 0 and record.onset < record.step - 1:
                    self._incident = record.incident  # it began before the state was loaded
                self._last_step = record.step
                self._log(record)

    def restart(self) -> None:
        """Call it after the engine's state is replaced."""
        self._last_step = -1

    def write_once(self, key: str, line: str) -> None:
        """Logs the first line of a key."""
        if key not in self._logged:
            self._logged.add(key)
            self._write(line)

    def _log(self, record: StepRecord) -> None:
        if clipped := self._ceiling.add(record.grad_norm):
            self._write(clipped)
        self._log_nonfinite_row(record)
        new, self._incident = record.incident > self._incident, record.incident
        if new and record.cause and is_logged(record.incident):
            self._write(self._incident_line(record))
        if not record.action or self._engine.mode == "observe":
            return
        # Only at a cut, because a rising schedule also changes the multiplier afterwards.
        if record.action & Action.CUT_LR and is_logged(record.incident):
            reset = ", moments reset" if self.resets_moments else ""
            self._write(f"step {record.step - 1}: learning rate × {record.lr_scale:g}{reset}")
        orders = self.take(record, record.action)
        for order, answer in _ANSWERS.items():
            if orders & order:
                self.write_once(
                    str(order),
                    f"step {record.step - 1}: the policy orders {names(order)[0]}, but attach() "
                    "alone cannot roll back or stop: use healcore.Healer or "
                    f"healcore.torch.heal_trainer, or {answer} if heal.last_decision().action "
                    "contains it",
                )

    def _log_nonfinite_row(self, record: StepRecord) -> None:
        """Logs an error after 100, 1,000, 10,000 steps in a row that were not finite."""
        row = self._nonfinite_row + 1 if record.cause & NONFINITE else 0
        self._nonfinite_row = row
        if row >= FROM_START and passes_power_of_ten(row - 1, row) and self.enabled:
            text = nonfinite_row_text(record, row, (), from_start=row == record.step)
            console.error(f"{self._name}: {text}", self.console)

    def _incident_line(self, record: StepRecord) -> str:
        is_first = record.onset == record.step - 1  # not: what was done at the onset is unknown
        alarm = SimpleNamespace(
            cause=names(record.cause),
            readings=record.readings,
            lr=self._learning_rate(),
            observed=self._engine.mode == "observe",
            skip=record.skip and is_first,
            skips=None,
            grad_scale=record.grad_scale if is_first and not self._engine.per_tensor else None,
            action=names(record.action) if is_first else (),
            lr_scale=record.lr_scale,
        )
        return f"step {record.onset}: incident {record.incident}: {alarm_text(alarm)}"

    def _write(self, line: str) -> None:
        if self.enabled:
            console.warning(f"{self._name}: {line}", self.console)
