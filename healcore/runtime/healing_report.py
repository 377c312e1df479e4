"""`HealingReport`: summary of the incidents and interventions of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.core.decision import Cause, names
from healcore.events.log import to_json
from healcore.events.models import Ending
from healcore.history.run import by_name
from healcore.runtime.data import BatchId
from healcore.runtime.run.ending.exits import RunStopped
from healcore.runtime.run.orders import RollbackRecord
from healcore.runtime.run.run import Run
from healcore.runtime.run.run_record import IncidentRecord
from healcore.runtime.story.diagnosis import advice, why_no_good_checkpoint
from healcore.runtime.story.postmortem import path_for


@dataclass(frozen=True, kw_only=True)
class HealingReport:
    """Summary of a run. `str()` returns lines to print, `to_dict()` a dict for `json.dumps`.

    Counts cover the whole run, including earlier processes and steps that a rollback has undone.
    """

    policy: str
    ending: str
    """An `Ending` (completed, stopped, exception, signal, ...), or "running" before the end."""
    converged: bool  # whether the run completed, with finite weights and no open incident
    steps: int  # optimizer steps done. A rollback decreases the number.
    attempts: int  # number of rollbacks
    steps_lost: int
    """Steps that rollbacks have undone and that were not repeated: the data was not rewound."""
    recoveries: int  # number of incidents that have ended
    history: tuple[IncidentRecord, ...]  # the incidents, oldest first
    rollbacks: tuple[RollbackRecord, ...]  # the rollbacks, oldest first
    counts: dict[str, int]
    """Name of a cause -> number of incidents. Other keys: `skips` and `clips` (steps),
    `lr_cuts`, and `shrinks` (micro-batch).
    A policy that observes has `observed_skips`, ..., for what it would have done."""
    skipped_batches: tuple[BatchId, ...]
    """Batches that rollbacks have left out, as (epoch, index) of any loader."""
    lr_scale: float  # current multiplier of the schedule's learning rate
    last_good: int | None  # step of the newest known-good checkpoint, or None without one
    probation: int | None  # healthy steps after which a checkpoint is known-good
    postmortem: Path | None  # path of this process's postmortem, or None without such a file
    diagnosis: str  # diagnosis of the stop, or an empty string if the policy did not stop the run
    advice: tuple[str, ...]
    """What to check in a run that is not healthy, or empty for a healthy run."""

    @classmethod
    def of(cls, run: Run, ending: Ending | None, error: BaseException | None) -> HealingReport:
        """The report of a run; `ending` is None before its end. `error` has ended the run."""
        end = run.recovery.run_end(Ending.COMPLETED)
        ledger = run.ledger
        causes = Counter(name for each in ledger.incidents for name in names(Cause(each.cause)))
        tallies = [engine["state"]["tally"] for engine in run.driver.engines().values()]
        changes = by_name(
            observes=run.policy.observes,
            skips=end.counts.skips,
            clips=sum(int(tally["clips"]) for tally in tallies),
            lr_cuts=sum(int(tally["lr_cuts"]) for tally in tallies),
        )
        events = run.log.events
        written = None if events.path is None else path_for(events.path, events.run)
        completed = ending == Ending.COMPLETED
        last = end.run.last_incident
        current = Cause(0) if last is None or last.over else end.cause
        return cls(
            policy=run.policy.name,
            ending=ending.value if ending else "running",
            converged=completed and not end.open and run.driver.has_finite_weights(),
            steps=end.step,
            attempts=end.counts.rollbacks,
            steps_lost=end.steps_lost,
            recoveries=sum(incident.over for incident in ledger.incidents),
            history=tuple(ledger.incidents),
            rollbacks=tuple(ledger.rollbacks),
            counts={**causes, **changes, "shrinks": run.record.shrinks},
            skipped_batches=tuple(sorted(run.loaders.skipped_ids())),
            lr_scale=end.lr_scale,
            last_good=end.last_good,
            probation=end.probation,
            postmortem=written if ending and written and written.exists() else None,
            diagnosis=error.diagnosis if isinstance(error, RunStopped) else "",
            advice=tuple(advice(current | end.lasting)) if end.open else (),
        )

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values for `json.dumps`; incidents, rollbacks and reports are dicts."""
        report: Any = to_json(self)
        return report

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {number}" for name, number in self.counts.items() if number)
        why_none = why_no_good_checkpoint(self.steps, self.probation)
        known_good = f"none{why_none}" if self.last_good is None else f"step {self.last_good}"
        lost = f" ({self.steps_lost} steps not repeated)" if self.steps_lost else ""
        lines = [
            f"policy      {self.policy}",
            f"ending      {self.ending} at step {self.steps}, healthy: {self.converged}",
            f"incidents   {len(self.history)}, {self.recoveries} of them over; {counts or 'none'}",
            f"rollbacks   {self.attempts}{lost}; learning rate × {self.lr_scale:g}",
            f"known-good  {known_good}",
            f"postmortem  {self.postmortem or 'none'}",
        ]
        if self.diagnosis:  # with its own advice
            return "\n".join([*lines, self.diagnosis])
        return "\n".join([*lines, *(f"advice      {hint}" for hint in self.advice)])
