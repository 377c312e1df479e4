"""An incident while its events are being read."""

from __future__ import annotations

from dataclasses import dataclass, field

from healcore.tools.report.story import Incident

MOST_ALARMS = 100
"""Alarms of one incident that get an event of their own."""


@dataclass
class Case:
    """An incident while it is being told."""

    number: int
    attempt: int
    onset_step: float
    step: float
    cause: list[str] = field(default_factory=list)
    action: list[str] = field(default_factory=list)
    skipped: int = 0
    checkpoint: int | None = None
    batches: list[tuple[int, int]] = field(default_factory=list)
    left_out: bool = False
    evidence: list[str] = field(default_factory=list)
    observed: bool = False
    came: list[str] = field(default_factory=list)
    """What came of it, in words."""
    rates: list[float] = field(default_factory=list)
    """Multipliers of the learning rate that it went through, the one before it first."""
    rollbacks: int = 0
    stop_step: float | None = None
    alarms: int = 0
    """How many of its alarms have an event of their own."""
    counted: bool = False
    """Whether `skipped` is from the metrics, which have every step."""

    @property
    def capped(self) -> bool:
        """Whether it may have had alarms that have no event."""
        return self.alarms >= MOST_ALARMS

    def cut(self, before: float | None, after: float | None) -> None:
        """The learning rate was cut, as one event or two have told."""
        if before is None or after is None:
            return
        if not self.rates:
            self.rates = [before]
        if after != self.rates[-1]:
            self.rates.append(after)

    def told(self) -> Incident:
        """The incident, when everything is known of it; where its rows are is not."""
        return Incident(
            number=self.number,
            attempt=self.attempt,
            onset=-1,
            index=-1,
            onset_step=self.onset_step,
            step=self.step,
            cause=tuple(self.cause),
            action=tuple(self.action),
            skipped=self.skipped,
            outcome=self._outcome(),
            lr_before=self.rates[0] if self.rates else None,
            lr_after=self.rates[-1] if self.rates else None,
            checkpoint=self.checkpoint,
            batches=tuple(self.batches),
            left_out=self.left_out,
            evidence=tuple(self.evidence),
            lr_path=tuple(self.rates),
            stop_step=self.stop_step,
        )

    def _outcome(self) -> str:
        if self.observed:
            return "; ".join([f"observed only: nothing was done{self._would()}", *self.came])
        if self.came:
            return "; ".join(self.came)
        if self.skipped:
            return f"skipped {self._steps()}, then training went on"
        return "training went on"

    def _steps(self) -> str:
        more = self.capped and not self.counted
        return f"{_count(self.skipped, 'step')}{' or more' if more else ''}"

    def _would(self) -> str:
        told = [f"skipped {self._steps()}"] if self.skipped else []
        if self.rollbacks:
            more = self.rollbacks - 1
            times = "once" if more == 1 else f"{more} times"
            told.append("gone back" + (f" ({times} more had that not helped)" if more else ""))
        if self.stop_step is not None:
            told.append(f"stopped the run at step {self.stop_step:.0f}")
        return f"; it would have {', '.join(told)}" if told else ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
