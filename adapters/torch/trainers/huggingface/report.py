"""Defines `HealingReport`: what healcore saw and did in a run of a transformers Trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.core.verdict import Cause, names
from healcore.runtime.events import json_lines
from healcore.runtime.events.models import Ending
from healcore.runtime.ledger import IncidentRecord
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem.diagnosis import (
    RollbackRecord,
    RunEnd,
    why_none_is_good,
    with_undone,
)
from healcore.torch.healing import Report


@dataclass(frozen=True, kw_only=True)
class HealingReport:
    """How a run was healed. `str()` gives it as lines to print, `to_dict()` as JSON-safe values.

    Counts are those of the whole run, earlier processes included, and with the steps that a
    rollback has undone.
    """

    policy: str
    ending: str
    """completed, stopped, exception, signal or interrupted; running, before the end."""
    converged: bool
    """It completed, with finite weights and no open incident."""
    steps: int
    """Optimizer steps done, the Trainer's global_step; a rollback decreases them."""
    attempts: int
    """Rollbacks; a callback does none."""
    recoveries: int
    """Incidents that are over."""
    history: tuple[IncidentRecord, ...]
    """The incidents, oldest first."""
    rollbacks: tuple[RollbackRecord, ...]
    """The rollbacks of this process."""
    counts: dict[str, int]
    """Name of a cause -> incidents with it; and `skips` and `clips` (steps), `undone_skips` (those
    that a rollback has undone), `lr_cuts`, `shrinks` of the micro-batch, and orders of a rollback
    `not_carried_out` (a callback cannot go back)."""
    lr_scale: float
    """What the learning rate is multiplied by; 1: the schedule as it is."""
    last_good: int | None
    """Step of the newest known-good checkpoint; None: there is none."""
    probation: int | None
    """Healthy steps after which a checkpoint is known-good."""
    quarantined: tuple[int, ...]
    """Steps of the Trainer's checkpoints that a callback has moved to `_healcore`."""
    postmortem: Path | None
    """The file about the end of this process, if there is one; a later run writes another one."""
    diagnosis: str
    """Why the run was stopped; "" if it was not."""
    optimizer: Report
    """How the optimizer is healed, and what that costs."""

    @classmethod
    def of(
        cls,
        end: RunEnd,
        *,
        ending: str,
        incidents: Sequence[IncidentRecord],
        driver: Any,
        counts: dict[str, int],
        quarantined: Iterable[int] = (),
        error: BaseException | None,
        **others: Any,
    ) -> HealingReport:
        """The report from the facts at its end, or so far (`ending` ""), and a TorchDriver."""
        causes = Counter(name for each in incidents for name in names(Cause(each.cause)))
        tally = driver.healing()["optimizer"]["state"]["tally"]
        return cls(
            ending=ending or "running",
            converged=ending == Ending.COMPLETED and not end.open and driver.finite(),
            steps=end.step,
            recoveries=sum(each.over for each in incidents),
            history=tuple(incidents),
            rollbacks=end.rollbacks,
            counts={
                **causes,
                "skips": end.skips,
                "undone_skips": end.undone_skips,
                "clips": int(tally["clips"]),
                "lr_cuts": int(tally["lr_cuts"]),
                **counts,
            },
            lr_scale=end.lr_scale,
            last_good=end.last_good,
            probation=end.probation,
            quarantined=tuple(quarantined),
            diagnosis=error.diagnosis if isinstance(error, RunStopped) else "",
            optimizer=driver.healings["optimizer"].report(),
            **others,
        )

    def to_dict(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        return json_lines.to_json(vars(self) | {"history": [vars(each) for each in self.history]})

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {number}" for name, number in self.counts.items() if number)
        undone = sum(each.undone for each in self.history)
        incidents = with_undone(str(len(self.history)), undone)
        good = f"none{why_none_is_good(self.steps, self.probation)}"
        if self.last_good is not None:
            good = f"step {self.last_good}"
        lines = [
            f"policy      {self.policy}",
            f"ending      {self.ending} at step {self.steps}, converged: {self.converged}",
            f"incidents   {incidents}, {self.recoveries} of them over; {counts or 'none'}",
            f"rollbacks   {self.attempts}; learning rate × {self.lr_scale:g}",
            f"known-good  {good}",
            f"postmortem  {self.postmortem or 'none'}",
        ]
        if self.quarantined:
            lines.append(f"quarantined {', '.join(map(str, self.quarantined))}")
        return "\n".join([*lines, *filter(None, [self.diagnosis]), str(self.optimizer)])
