"""`IncidentLog`: one line for each incident, for `attach` without a Healer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

from torch.optim import Optimizer

from healcore import console
from healcore.console import is_logged, passes_power_of_ten
from healcore.core.decision import NONFINITE, Action, StepRecord, names
from healcore.core.engine import Engine
from healcore.events.schema import alarm_text
from healcore.runtime.story.diagnosis import FROM_START, nonfinite_streak_text
from healcore.runtime.story.program_clip import ProgramClip
from healcore.torch.ranks import StepRanks

WITHOUT_LOSS = 20
"""Steps without a loss after which a warning is logged."""

_ANSWERS = {
    Action.ROLLBACK: "restore a checkpoint and call heal.on_rollback()",
    Action.STOP: "end the run",
}
"""Order -> what a loop without a Healer has to do."""


class IncidentLog:
    """Logs one line per incident, with the optimizer's class; on the first rank only.

    Without a Healer nobody rolls back or stops the run, so a line also says what the loop has to do
    if the policy orders it. With a Healer the `IncidentMonitor` of the run writes these lines.

    Args:
        optimizer: the optimizer, whose class and learning rate the lines name.
        engine: the policy's engine.
        ranks: the ranks that step together.
        resets_moments: see the attribute.

    Attributes:
        resets_moments: whether a cut of the learning rate resets the moments too.
        console: see `attach`.
    """

    def __init__(
        self, optimizer: Optimizer, engine: Engine, ranks: StepRanks, resets_moments: bool
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._ranks = ranks
        self.resets_moments = resets_moments
        self.console: console.Console = "auto"
        self._nonfinite_streak = 0
        """Steps in a row that were not finite."""
        self._incident = 0
        """Number of the newest incident."""
        self._logged: set[str] = set()
        """Lines of `write_once`."""
        self._missing_loss = MissingLoss(engine)
        self._program_clip = ProgramClip()
        self.restart()

    def restart(self) -> None:
        """Forgets the last step. Call it after the engine's state is replaced.

        An incident that began before the loaded state was saved is not logged again.
        """
        self._last_step = -1
        """Number of the last record's step, or -1 before the first record of a state."""

    def add(self, records: Iterable[StepRecord], *, has_seen_loss: bool) -> None:
        """Logs the records of steps.

        Args:
            records: records of judged steps, oldest first.
            has_seen_loss: whether any step so far has had a loss.
        """
        for record in records:
            if record.step == self._last_step:
                continue  # a step that a GradScaler skips has the record of the step before
            if self._last_step < 0 and record.onset < record.step - 1:
                self._incident = record.incident  # it began before the state was loaded
            self._last_step = record.step
            for line in self._missing_loss.add(has_seen_loss=has_seen_loss):
                self._write(line)
            if not record.skip:
                line = self._program_clip.add(record.grad_norm)
                if line:
                    self._write(line)
            self._log(record)

    def write_once(self, line: str) -> None:
        """Logs a line, unless it was logged by an earlier call."""
        if line not in self._logged:
            self._logged.add(line)
            self._write(line)

    def _log(self, record: StepRecord) -> None:
        """Logs what is new in a record."""
        if record.cause & NONFINITE:
            self._nonfinite_streak += 1
        else:
            self._nonfinite_streak = 0
        streak = self._nonfinite_streak
        # An error after 100, 1,000, 10,000 steps in a row that were not finite.
        if streak >= FROM_START and passes_power_of_ten(streak - 1, streak):
            text = nonfinite_streak_text(record, streak, (), from_start=streak == record.step)
            self._write(text, console.error)
        is_new = record.incident > self._incident
        self._incident = record.incident
        if is_new and record.cause and is_logged(record.incident):
            self._write(self._incident_line(record))
        if self._engine.mode == "observe":
            return
        # Only at a cut, because a rising schedule also changes the multiplier afterwards.
        if record.action & Action.CUT_LR and is_logged(record.incident):
            line = f"step {record.step - 1}: learning rate × {record.lr_scale:g}"
            if self.resets_moments:
                line += ", moments reset"
            self._write(line)
        for order, answer in _ANSWERS.items():
            if record.action & order:
                self.write_once(
                    f"the policy orders {names(order)[0]}, but attach() alone cannot roll back or "
                    "stop: use healcore.Healer or healcore.torch.heal_trainer, or "
                    f"{answer} if heal.last_decision().action contains it"
                )

    def _incident_line(self, record: StepRecord) -> str:
        """The line for a new incident."""
        alarm = SimpleNamespace(
            cause=names(record.cause),
            readings=record.readings,
            lr=None,
            observed=self._engine.mode == "observe",
            skip=False,
            skips=None,
            grad_scale=None,
            action=(),
            lr_scale=record.lr_scale,
        )
        rate = self._optimizer.param_groups[0].get("lr")
        if rate is not None:
            alarm.lr = float(rate)
        # What was done at an earlier onset is unknown: this is the record of a later step.
        if record.onset == record.step - 1:
            alarm.skip = record.skip
            alarm.action = names(record.action)
            if not self._engine.per_tensor:
                alarm.grad_scale = record.grad_scale
        return f"step {record.onset}: incident {record.incident}: {alarm_text(alarm)}"

    def _write(
        self, line: str, write: Callable[[str, console.Console], None] = console.warning
    ) -> None:
        if self._ranks.is_first:
            write(f"{type(self._optimizer).__name__}: {line}", self.console)


class MissingLoss:
    """Notices, once, that the loop observes no loss, which would disable detectors silently.

    Args:
        engine: the policy's engine, which says whether any detector reads the loss.
    """

    def __init__(self, engine: Engine) -> None:
        self._reads_loss = "loss" in engine.needs
        self._steps = 0

    def add(self, *, has_seen_loss: bool) -> list[str]:
        """Adds a judged step.

        Args:
            has_seen_loss: whether any step so far has had a loss.

        Returns:
            One warning at step `WITHOUT_LOSS` of a loop without losses, otherwise nothing.
        """
        self._steps += 1
        if has_seen_loss or not self._reads_loss or self._steps != WITHOUT_LOSS:
            return []
        return [
            f"no loss has been observed in {WITHOUT_LOSS} steps: call observe(loss) before "
            "each optimizer.step(); detectors that read it are inactive"
        ]
