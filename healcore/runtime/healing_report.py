"""`HealingReport`: summary of the incidents and interventions of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.core.decision import Cause, names_of
from healcore.events.log import to_json
from healcore.events.models import Ending
from healcore.history.run_history import changes_made
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.diagnosis import RunOutcome, explain, hints
from healcore.runtime.reporting.postmortem import path_for
from healcore.runtime.run.journal import IncidentRecord
from healcore.runtime.run.out_of_memory import memory_text
from healcore.runtime.run.run import Run
from healcore.runtime.run.trouble import RollbackRecord


@dataclass(frozen=True, kw_only=True)
class HealingReport:
    """Summary of a run. `str()` returns lines to print, `to_dict()` a dict for `json.dumps`.

    Counts cover the whole run, including earlier processes and steps that a rollback has undone.
    """

    policy: str
    """Name of the policy."""
    ending: str
    """An `Ending` (completed, stopped, exception, signal, ...), or "running" before the end."""
    converged: bool
    """Whether the run completed, with finite weights, no open incident and no damage that was not
    repaired."""
    steps: int
    """Optimizer steps done. A rollback decreases the number."""
    attempts: int
    """Number of rollbacks."""
    steps_lost: int
    """Steps that rollbacks have undone and that were not repeated: the data was not rewound."""
    history: tuple[IncidentRecord, ...]
    """The incidents, oldest first."""
    rollbacks: tuple[RollbackRecord, ...]
    """The rollbacks, oldest first."""
    counts: dict[str, int]
    """Name of a cause -> number of incidents. Other keys: `skips` and `clips` (steps),
    `lr_cuts`, and `shrinks` (micro-batch).
    A policy that observes has `observed_skips`, ..., for what it would have done."""
    skipped_batches: tuple[BatchId, ...]
    """Batches that rollbacks have skipped, as (epoch, index) of any loader."""
    lr_scale: float
    """Current multiplier of the schedule's learning rate."""
    last_good: int | None
    """Step of the newest known-good checkpoint, or None without one."""
    postmortem: Path | None
    """Path of this process's postmortem, or None without such a file."""
    diagnosis: str
    """The findings at the end of the run, or so far, as text."""
    advice: tuple[str, ...]
    """What to check in a run that is not healthy, or empty for a healthy run."""
    unrepaired: tuple[int, ...] = ()
    """Steps at which damage began that the weights still have, because it has come back after each
    rollback, or no checkpoint could be restored; or empty. A change that the program makes on
    purpose looks the same."""
    memory: str = ""
    """The file of the memory profile, or an empty string if the profile was not requested."""

    @classmethod
    def of(cls, run: Run, *, memory: bool = False) -> HealingReport:
        """The report of a run.

        Args:
            run: the run, open or ended.
            memory: whether to write a memory profile.
        """
        end = run.end
        ending = Ending.RUNNING
        if end is not None:
            ending = end.ending
        outcome = RunOutcome.of(run, ending)
        ledger, counts = run.ledger, outcome.counts
        causes: Counter[str] = Counter()
        for incident in ledger.incidents:
            causes.update(names_of(Cause(incident.cause)))
        changes = {"skips": counts.skips, "clips": counts.clips, "lr_cuts": counts.lr_cuts}
        healthy = not outcome.open and not outcome.unrepaired
        completed = ending == Ending.COMPLETED and healthy
        events, postmortem = run.log.events, None
        if events.path is not None and end is not None:
            path = path_for(events.path, events.process_id)
            if path.exists():
                postmortem = path
        found: tuple[str, ...] = ()
        if not healthy:
            found = tuple(hints(outcome))
        profile = ""
        if memory:
            profile = memory_text(run)
        return cls(
            policy=run.policy.name,
            ending=str(ending),
            converged=completed and run.driver.has_finite_weights(),
            steps=outcome.step,
            attempts=counts.rollbacks,
            steps_lost=outcome.steps_lost,
            history=tuple(ledger.incidents),
            rollbacks=tuple(ledger.rollbacks),
            counts={
                **causes,
                **changes_made(changes, observes=run.policy.observes),
                "shrinks": run.record.shrinks,
            },
            skipped_batches=tuple(sorted(run.loaders.skipped_ids())),
            lr_scale=outcome.lr_scale,
            last_good=outcome.last_good,
            postmortem=postmortem,
            diagnosis=explain(outcome),
            advice=found,
            unrepaired=outcome.unrepaired,
            memory=profile,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict of plain values for `json.dumps`.

        Returns:
            Name of a field -> value. Incidents and rollbacks are dicts, paths are texts.
        """
        report: Any = to_json(self)
        report["rollbacks"] = [to_json(each.to_dict()) for each in self.rollbacks]
        return report

    def __str__(self) -> str:
        lines = [f"Policy: {self.policy}", self.diagnosis]
        if self.postmortem:
            lines.append(f"Postmortem: {self.postmortem}")
        if self.memory:
            lines.append(f"Memory: {self.memory}")
        return "\n".join(lines)
