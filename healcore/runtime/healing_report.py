"""Defines `HealingReport`: what healcore has seen and done in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.core.verdict import Cause, names
from healcore.events import json_lines
from healcore.events.models import Ending
from healcore.runtime.driver import Driver
from healcore.runtime.incidents.ledger import IncidentRecord
from healcore.runtime.incidents.rollback import Rollback
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem.diagnosis import (
    RunEnd,
    why_none_is_good,
    with_undone,
)


@dataclass(frozen=True, kw_only=True)
class HealingReport:
    """How a run was healed. `str()` gives lines to print, `to_dict()` a dict for `json.dumps`.

    Counts cover the whole run: earlier processes, and steps that a rollback has undone.
    """

    policy: str
    ending: str
    """An `Ending` (completed, stopped, exception, signal, ...), or "running" before the end."""
    converged: bool
    """Whether the run completed, with finite weights and no open incident."""
    steps: int
    """Optimizer steps done; a rollback decreases the number."""
    attempts: int
    """Rollbacks carried out. A transformers callback carries out none."""
    recoveries: int
    """Incidents that are over."""
    history: tuple[IncidentRecord, ...]
    """The incidents, oldest first."""
    rollbacks: tuple[Rollback, ...]
    """The rollbacks, oldest first."""
    counts: dict[str, int]
    """Name of a cause -> number of incidents. Also `skips` and `clips` (steps), `undone_skips`
    (skips that a rollback has undone), `lr_cuts`, `shrinks` of the micro-batch, and
    `not_carried_out` (rollbacks that a transformers callback could not carry out)."""
    lr_scale: float
    """Multiplier of the schedule's learning rate."""
    last_good: int | None
    """Step of the newest known-good checkpoint, or None without one."""
    probation: int | None
    """Healthy steps after which a checkpoint is known-good."""
    quarantined: tuple[int, ...]
    """Steps of the Trainer's checkpoints that a transformers callback has moved to `_healcore`."""
    postmortem: Path | None
    """Postmortem of this process, or None if there is no such file."""
    diagnosis: str
    """Why the run was stopped, or an empty string."""
    optimizers: Mapping[str, object]
    """torch: name -> `healcore.torch.Report`, how the optimizer is healed. Empty in JAX."""

    @classmethod
    def of(
        cls,
        end: RunEnd,
        *,
        ending: str,
        incidents: Sequence[IncidentRecord],
        driver: Driver,
        counts: Mapping[str, int],
        quarantined: Iterable[int] = (),
        error: BaseException | None,
        **others: Any,
    ) -> HealingReport:
        """The report of a run; `ending` is an empty string before its end."""
        causes = Counter(name for each in incidents for name in names(Cause(each.cause)))
        tallies = [each["state"]["tally"] for each in driver.healing().values()]
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
                **{name: sum(int(t[name]) for t in tallies) for name in ("clips", "lr_cuts")},
                **counts,
            },
            lr_scale=end.lr_scale,
            last_good=end.last_good,
            probation=end.probation,
            quarantined=tuple(quarantined),
            diagnosis=error.diagnosis if isinstance(error, RunStopped) else "",
            optimizers=driver.optimizer_reports(),
            **others,
        )

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values for `json.dumps`; incidents, rollbacks and reports are dicts."""
        return json_lines.to_json(
            vars(self)
            | {
                "history": [vars(each) for each in self.history],
                "rollbacks": [vars(each) for each in self.rollbacks],
                "optimizers": {name: vars(each) for name, each in self.optimizers.items()},
            }
        )

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
        return "\n".join(
            [*lines, *filter(None, [self.diagnosis]), *map(str, self.optimizers.values())]
        )
