"""`AttachLog`: what `attach` logs without a Healer, a line per incident."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor
from torch.optim import Optimizer

from healcore import console
from healcore.console import is_logged, is_power_of_ten
from healcore.core.decision import NONFINITE, Action, names_of
from healcore.core.step_record import StepRecord
from healcore.events.kinds import alarm_text
from healcore.runtime.reporting.nonfinite_steps import FROM_START, nonfinite_streak_text
from healcore.torch.live_engine import LiveEngine, PendingRecord
from healcore.torch.measurement import Measurement, Measurer
from healcore.torch.ranks import StepRanks


class AttachLog:
    """Logs one line per incident, with the optimizer's class; on the first rank only.

    It is the `StepListener` of a healed step without a Healer.

    Without a Healer nothing rolls back or stops the run, so a line also says what the loop has to
    do if the policy orders it. With a Healer the `IncidentMonitor` of the run writes these lines.

    Args:
        optimizer: the optimizer, whose class and learning rate the lines name.
        live: the policy's engine with its state.
        measurer: measures the steps.
        ranks: the ranks that step together.
        resets_moments: whether a cut of the learning rate resets the moments too.

    Attributes:
        console: see `attach`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        live: LiveEngine,
        measurer: Measurer,
        ranks: StepRanks,
        *,
        resets_moments: bool,
    ) -> None:
        self._optimizer = optimizer
        self._live = live
        self._measurer = measurer
        self._ranks = ranks
        self._resets_moments = resets_moments
        self.console: console.Console = "auto"
        self._incident = 0
        """Number of the newest incident that needs no line any more."""
        self._unread: deque[PendingRecord] = deque()
        """Records that are not logged yet, oldest first."""
        self._logged: set[str] = set()
        """Lines of `write_once`."""
        self._nonfinite = 0
        """Steps in a row that were not finite."""

    def judged(self, measured: Measurement) -> None:
        """See `StepListener.judged`."""
        line = self._measurer.missing_loss(observed=self._measurer.has_seen_loss)
        if line:
            self.write(line)
        self._unread.append(self._live.pending_record())

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`. Logs the records that have arrived."""
        self._log_all_but(self._live.record_lag)

    def on_state_loaded(self) -> None:
        """Logs all records of the earlier state, so that no alarm is lost.

        An incident that began before the loaded state was saved is not logged again.
        """
        self._log_all_but(0)
        self._incident = int(self._live.state.incident.number)

    def write_once(self, line: str) -> None:
        """Logs a line, unless it was logged by an earlier call."""
        if line not in self._logged:
            self._logged.add(line)
            self.write(line)

    def write(
        self, line: str, write: Callable[[str, console.Console], None] = console.warning
    ) -> None:
        """Logs a line, on the first rank.

        Args:
            line: the line, without the optimizer's class.
            write: `console.warning` or `console.error`.
        """
        if self._ranks.is_first:
            write(f"{type(self._optimizer).__name__}: {line}", self.console)

    def _log_all_but(self, newest: int) -> None:
        while len(self._unread) > newest:
            self._log(self._unread.popleft()())

    def _log(self, record: StepRecord) -> None:
        """Logs what is new in the record of a step."""
        if not record.judged:
            return
        self._log_nonfinite_streak(record)
        is_new = record.incident > self._incident
        self._incident = record.incident
        if is_new and record.cause and is_logged(record.incident):
            self.write(self._incident_line(record))
        if record.action and self._live.engine.mode != "observe":
            self._log_action(record)

    def _log_nonfinite_streak(self, record: StepRecord) -> None:
        """Logs that every step is non-finite: after 100, 1,000, 10,000 steps in a row."""
        if not record.cause or not record.cause & NONFINITE:
            self._nonfinite = 0
            return
        self._nonfinite += 1
        steps = self._nonfinite
        if steps >= FROM_START and is_power_of_ten(steps):
            from_start = steps == record.step
            text = nonfinite_streak_text(record, steps, (), from_start=from_start)
            self.write(text, console.error)

    def _log_action(self, record: StepRecord) -> None:
        """Logs a cut of the learning rate, and orders that the loop has to carry out itself."""
        # Only at a cut, because a rising schedule also changes the multiplier afterwards.
        if record.action & Action.CUT_LR and is_logged(record.incident):
            line = f"step {record.step - 1}: learning rate × {record.lr_scale:g}"
            if self._resets_moments:
                line += ", moments reset"
            self.write(line)
        orders = record.action & (Action.ROLLBACK | Action.STOP)
        if orders:
            self.write_once(
                f"the policy orders {' and '.join(names_of(orders))}, but attach() alone cannot "
                "roll back or stop: use healcore.Healer or healcore.torch.heal_trainer, or do what "
                "heal.last_decision().action says (for a rollback restore a checkpoint and call "
                "heal.on_rollback())"
            )

    def _incident_line(self, record: StepRecord) -> str:
        """The line for a new incident."""
        alarm = SimpleNamespace(
            cause=names_of(record.cause),
            readings=record.readings,
            lr=None,
            why=None,
            observed=self._live.engine.mode == "observe",
            skip=not record.taken,
            skips=None,
            grad_scale=None,
            action=names_of(record.action),
            lr_scale=record.lr_scale,
        )
        rate = self._optimizer.param_groups[0].get("lr")
        if rate is not None:
            alarm.lr = float(rate)
        if not self._live.engine.per_tensor:
            alarm.grad_scale = record.grad_scale
        return f"step {record.step - 1}: incident {record.incident}: {alarm_text(alarm)}"
