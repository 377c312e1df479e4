"""An incident while its events are being read."""

from __future__ import annotations

from dataclasses import dataclass, field

from healcore.tools.report.story import Incident


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
    before: float | None = None
    after: float | None = None
    checkpoint: int | None = None
    batches: list[tuple[int, int]] = field(default_factory=list)
    left_out: bool = False
    evidence: list[str] = field(default_factory=list)
    observed: bool = False
    came: list[str] = field(default_factory=list)
    """What came of it, in words."""

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
            lr_before=self.before,
            lr_after=self.after,
            checkpoint=self.checkpoint,
            batches=tuple(self.batches),
            left_out=self.left_out,
            evidence=tuple(self.evidence),
        )

    def _outcome(self) -> str:
        if self.observed:
            return "; ".join(["observed only: nothing was done", *self.came])
        if self.came:
            return "; ".join(self.came)
        if self.skipped:
            return f"skipped {_count(self.skipped, 'step')}, then training went on"
        return "training went on"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
