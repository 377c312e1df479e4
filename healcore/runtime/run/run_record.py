"""`RunRecord`: what a checkpoint holds besides the state; see also `ledger` and `data_state`.

A part of it is about the run, and outlives every way back: settings, budgets, the ledger. The other
part is about the step, and comes back with the checkpoint: `RunRecord.go_back_to`. A rollback
replaces the record of the checkpoint that it restores.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter

from healcore.runtime.data import BatchId
from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.healthy_ranges import HealthyValues
from healcore.runtime.run.journal import Journal, Ledger
from healcore.runtime.run.out_of_memory import PartSize
from healcore.runtime.run.witness.evidence import ComparisonState
from healcore.runtime.store.checkpoints import AttemptHistory, StoreError

MAX_CHANGES = 100
"""Changes of the structure of the model to remember: a cloud of Gaussians changes it often."""


class StructureChange(NamedTuple):
    """A change of the structure of the model or of its optimizers, by the program.

    Checkpoints from before the change do not fit the model any more, and a rollback cannot restore
    them. The record keeps the change, so that a restart knows this too.
    """

    step: int
    """The first step with the new structure. Checkpoints up to it have the old one."""
    epoch: int
    """Epoch of this step."""


SCHEMA = 15


@dataclass(kw_only=True)
class RunRecord:
    """The facts of a run after some step, which a checkpoint holds as JSON.

    A checkpoint of the state alone would begin a new run: budgets would be full again, the batches
    that the run has skipped would come back, and trouble would be answered as if it were new.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    run: str = ""
    """Id of the run's first process, which names the run for trackers."""
    first_step: NonNegativeInt = 0
    """Step of the run's first snapshot."""
    attempts: list[NonNegativeInt] = field(default_factory=list)
    """First step of each attempt, see `AttemptHistory`."""
    known_good_up_to: int = -1
    """Step up to which checkpoints are known-good, see `AttemptHistory`."""
    completed: bool = False
    """Whether the program had reached its end."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Learning rate, batch size, policy and other settings of the start, see `run_settings`."""
    nonfinite_ok: list[str] = field(default_factory=list)
    """Names of arrays that were not finite in the first snapshot."""
    part_size: PartSize = field(default_factory=PartSize)
    """Size of the parts of a step."""
    shrinks: NonNegativeInt = 0
    """Number of times that memory ran out and the parts were halved."""
    changes: list[StructureChange] = field(default_factory=list)
    """Changes of the structure of the model, oldest first, at most `MAX_CHANGES`."""
    ledger: Ledger = field(default_factory=Ledger)
    """Incidents, rollbacks and skips, also of undone steps."""

    # -- at the step of the checkpoint
    step: NonNegativeInt = 0
    """Number of steps done."""
    world: Annotated[int, Field(ge=1)] = 1
    """Number of ranks."""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of an engine -> its `Engine.to_dict`."""
    journal: Journal = field(default_factory=Journal)
    """What the steps have shown."""
    healthy: HealthyValues = field(default_factory=HealthyValues)
    """The ranges in which the run was healthy, up to the newest healthy checkpoint."""
    envelope: Envelope = field(default_factory=Envelope)
    """What is held in these ranges now."""
    skipped: dict[str, list[BatchId]] = field(default_factory=dict)
    """Name of a source -> ids of the batches that it skips."""
    comparisons: ComparisonState = field(default_factory=ComparisonState)
    """What the comparisons of weights have shown."""
    is_in_body: bool = False
    """Whether the program saved in the body of its loop. The work between two steps that follows
    `step` was not done then."""
    last_regular: int | None = None
    """Step of the last regular save, or None without one."""

    @property
    def attempt_history(self) -> AttemptHistory:
        """The attempts of the run, and the step up to which checkpoints are known-good.

        With it, the store distinguishes checkpoints of the current attempt from abandoned
        checkpoints, which a rollback has undone.
        """
        return AttemptHistory(tuple(self.attempts), self.known_good_up_to)

    def continue_run(self, newest: RunRecord) -> None:
        """Takes the facts of the run from the newest record, at a start.

        Args:
            newest: the newest record in the store.
        """
        vars(self).update(vars(newest), completed=False)

    def go_back_to(self, saved: RunRecord) -> None:
        """Takes the facts of a step, at a start and at a rollback. Those of the run stay.

        Args:
            saved: the record of the checkpoint from which the run continues.
        """
        for name in _AT_STEP:
            setattr(self, name, getattr(saved, name))
        self.ledger.end_incident()
        # The program will make a change in undone steps once more.
        self.changes = [each for each in self.changes if each.step < saved.step]

    def at(self, saved: RunRecord) -> RunRecord:
        """A copy with the facts of the run, and those of another step.

        Args:
            saved: the record of the checkpoint of that step.
        """
        ledger, comparisons = copy.deepcopy(self.ledger), saved.comparisons
        other = replace(self, ledger=ledger, comparisons=comparisons, completed=False)
        other.go_back_to(saved)
        return other

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-safe values, with the version `SCHEMA` of its format.

        A checkpoint holds the result. `RunRecord.of` reads it, and raises if the version is not its
        own: a record that was understood in part could lead to a wrong decision.
        """
        return {**_RECORD.dump_python(self, warnings=False), "schema": SCHEMA}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> RunRecord:
        """Makes a record of what `to_dict` has returned.

        Args:
            stored: the values, as read from a checkpoint.

        Raises:
            StoreError: another version of healcore has written them.
            ValueError: a value is missing, unknown, or of another type.
        """
        content = dict(stored)
        if content.pop("schema", None) != SCHEMA:
            raise StoreError("it is of another version of healcore: resume with that version")
        return _RECORD.validate_json(json.dumps(content), strict=True)


_AT_STEP = (
    *("step", "world", "engines", "journal", "healthy", "envelope"),
    *("skipped", "is_in_body", "last_regular"),
)
"""Fields about a step. `comparisons` is one too, which the witness takes."""
_RECORD = TypeAdapter(RunRecord)
