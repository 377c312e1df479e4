"""`HealingReport`: summary of the incidents and interventions of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.console import counted
from healcore.core.decision import Cause, names_of
from healcore.events.json_lines import to_json
from healcore.events.models import Ending
from healcore.history.incidents import name_changes
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.diagnosis import RunOutcome, hints, unrepaired_text
from healcore.runtime.reporting.postmortem import path_for
from healcore.runtime.run.ending.exits import RunStopped
from healcore.runtime.run.ledger import IncidentRecord
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
    """Diagnosis of the stop, or an empty string if the policy did not stop the run."""
    advice: tuple[str, ...]
    """What to check in a run that is not healthy, or empty for a healthy run."""
    unrepaired: tuple[int, ...] = ()
    """Steps at which damage began that the weights still have, because it has come back after each
    rollback, or no checkpoint could be restored; or empty. A change that the program makes on
    purpose looks the same."""
    memory: str = ""
    """What holds most of the memory, and the files of the memory profile; or an empty string if the
    profile was not requested."""

    @classmethod
    def of(cls, run: Run, *, memory: bool = False) -> HealingReport:
        """The report of a run.

        Args:
            run: the run, open or ended.
            memory: whether to write a memory profile.
        """
        end = run.end
        outcome = RunOutcome.of(run, Ending.COMPLETED if end is None else end.ending)
        ledger = run.ledger
        causes: Counter[str] = Counter()
        for incident in ledger.incidents:
            causes.update(names_of(Cause(incident.cause)))
        # The engines count clips and cuts too, and have counted steps that the host has not read.
        tallies = [engine["state"]["tally"] for engine in run.driver.engines().values()]
        changes = name_changes(
            observes=run.policy.observes,
            skips=outcome.counts.skips,
            clips=sum(int(tally["clips"]) for tally in tallies),
            lr_cuts=sum(int(tally["lr_cuts"]) for tally in tallies),
        )
        healthy = not outcome.open and not outcome.unrepaired
        completed = end is not None and end.ending == Ending.COMPLETED
        error = None if end is None else end.error
        return cls(
            policy=run.policy.name,
            ending="running" if end is None else end.ending.value,
            converged=completed and healthy and run.driver.has_finite_weights(),
            steps=outcome.step,
            attempts=outcome.counts.rollbacks,
            steps_lost=outcome.steps_lost,
            history=tuple(ledger.incidents),
            rollbacks=tuple(ledger.rollbacks),
            counts={**causes, **changes, "shrinks": run.record.shrinks},
            skipped_batches=tuple(sorted(run.loaders.skipped_ids())),
            lr_scale=outcome.lr_scale,
            last_good=outcome.last_good,
            postmortem=None if end is None else _postmortem_of(run),
            diagnosis=error.diagnosis if isinstance(error, RunStopped) else "",
            advice=() if healthy else tuple(hints(outcome)),
            unrepaired=outcome.unrepaired,
            memory=memory_text(run) if memory else "",
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
        counts = ", ".join(f"{name} {number}" for name, number in self.counts.items() if number)
        rollbacks = f"{self.attempts}"
        if self.rollbacks:
            rollbacks += f", the last to step {self.rollbacks[-1].checkpoint}"
        if self.steps_lost:
            rollbacks += f", {counted(self.steps_lost, 'step')} not repeated"
        healthy = f"{self.converged}"
        if self.unrepaired:
            healthy += f" ({unrepaired_text(self.unrepaired)})"
        lines = {
            "policy": self.policy,
            "ending": f"{self.ending} at step {self.steps}, healthy at the end: {healthy}",
            "incidents": f"{len(self.history)}; {counts or 'nothing was changed'}",
            "rollbacks": f"{rollbacks}; learning rate × {self.lr_scale:g} now",
            "known-good": "none" if self.last_good is None else f"step {self.last_good}",
            "postmortem": f"{self.postmortem or 'none'}",
            "memory": self.memory,
        }
        text = [f"{name:11} {value}" for name, value in lines.items() if value]
        # The diagnosis has advice of its own.
        advice = [f"{'advice':11} {hint}" for hint in self.advice]
        return "\n".join([*text, *([self.diagnosis] if self.diagnosis else advice)])


def _postmortem_of(run: Run) -> Path | None:
    """Path of the postmortem that this process has written, or None."""
    events = run.log.events
    if events.path is None:
        return None
    path = path_for(events.path, events.process_id)
    return path if path.exists() else None
