"""What happened in a run of a healed trainer, as one object."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.core.verdict import Cause, names
from healcore.runtime.events.models import Ending
from healcore.runtime.healer import Healer
from healcore.runtime.ledger import IncidentRecord
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.diagnosis import RollbackRecord


@dataclass(frozen=True, kw_only=True)
class HealingReport:
    """How a run was healed. `str()` gives it as lines to print."""

    ending: str
    """completed, stopped, exception, signal or interrupted; running, before the end."""
    converged: bool
    """It completed, with finite weights and no open incident."""
    steps: int
    """Optimizer steps done; a rollback decreases them."""
    attempts: int
    """Rollbacks, those of earlier processes of the run included."""
    recoveries: int
    """Incidents that are over."""
    history: tuple[IncidentRecord, ...]
    """The incidents, oldest first."""
    rollbacks: tuple[RollbackRecord, ...]
    """Those of this process: step, target, learning rate before and after."""
    counts: dict[str, int]
    """Name of a cause -> incidents with it; `skips` and `shrinks` too."""
    lr_scale: float
    """The factor on the learning rate at the end."""
    last_good: int | None
    """Step of the newest known-good checkpoint."""
    postmortem: Path | None
    """The file about the end of this process; a later run writes another one."""
    diagnosis: str
    """Why the run was stopped; "" if it was not."""

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {number}" for name, number in self.counts.items() if number)
        lines = [
            f"ending      {self.ending} at step {self.steps}, converged: {self.converged}",
            f"incidents   {len(self.history)}, {self.recoveries} of them over; {counts or 'none'}",
            f"rollbacks   {self.attempts}; learning rate × {self.lr_scale:g}",
            f"known-good  {'none' if self.last_good is None else f'step {self.last_good}'}",
            f"postmortem  {self.postmortem or 'none'}",
        ]
        return "\n".join(line for line in [*lines, self.diagnosis] if line)


def report_of(
    healer: Healer[Any], ending: Ending | None, error: BaseException | None, *, shrinks: int
) -> HealingReport:
    """The report about a Healer's run, during it (`ending` None) or after it."""
    incidents = healer.incidents
    end = healer.run_end()
    counts = Counter(name for each in incidents for name in names(Cause(each.cause)))
    completed = ending == Ending.COMPLETED
    return HealingReport(
        ending="running" if ending is None else str(ending),
        converged=completed and not end.open and healer.driver.finite(),
        steps=healer.step,
        attempts=healer.rollbacks,
        recoveries=sum(each.over for each in incidents),
        history=incidents,
        rollbacks=end.rollbacks,
        counts={**counts, "skips": end.skips, "shrinks": shrinks},
        lr_scale=end.lr_scale,
        last_good=end.last_good,
        postmortem=_postmortem(healer) if ending is not None else None,
        diagnosis=error.diagnosis if isinstance(error, RunStopped) else "",
    )


def _postmortem(healer: Healer[Any]) -> Path | None:
    events = healer.events
    if events.path is None:
        return None
    path = postmortem.path_for(events.path, events.run)
    return path if path.exists() else None
