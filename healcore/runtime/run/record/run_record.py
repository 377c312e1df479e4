"""`RunRecord`: what a checkpoint holds besides the state; see also `ledger` and `data_state`.

A restart reads the budgets, the learning-rate multiplier and the skipped batches from the record of
the checkpoint that it resumes. A rollback replaces the record of the checkpoint that it restores.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter

from healcore.runtime.run.batch_parts import PartGrowth
from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.monitor_state import MonitorState, take_fields
from healcore.runtime.run.orders import nested
from healcore.runtime.run.record.ledger import Ledger
from healcore.runtime.store.checkpoints import AttemptHistory, StoreError

MAX_CHANGES = 100
"""Changes of the structure of the model to remember: a cloud of Gaussians changes it often."""


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What was in force before the rollbacks for one trouble, the newest trouble of the run.

    A remedy is a trial. If the trouble stops the run all the same, the program itself causes the
    trouble, and its author mends the program. The mended program must not keep the limited rate and
    the skipped batches of these trials. So the next start undoes them: it resumes from the oldest
    checkpoint that the trials have restored, with these values.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    first: NonNegativeInt
    """Number of rollbacks before the first rollback for this trouble."""
    oldest: NonNegativeInt
    """Step of the oldest checkpoint that was restored. Its arrays are from before the trials."""
    engines: dict[str, dict[str, Any]]
    """Name of an engine -> its limits and budgets, see `engine_states.limits_and_budgets`."""
    skipped: dict[str, list[Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]]]
    """Number of a loader -> ids of the batches that the loader skips."""
    held: Held
    """What is held in its healthy range."""
    silent_until: int = 0
    """Step before which weights are not compared."""
    accepted: int = 0
    """See `Ledger`."""
    accepted_until: int = 0
    """See `Ledger`."""
    failed: bool = False
    """Whether the trouble has stopped the run, so that the next start undoes the trials."""


class StructureChange(NamedTuple):
    """A change of the structure of the model or of its optimizers, by the program.

    Checkpoints from before the change do not fit the model any more, and a rollback cannot restore
    them. The record keeps the change, so that a restart knows this too.
    """

    step: int
    """The first step with the new structure. Checkpoints up to it have the old one."""
    epoch: int
    """Epoch of this step."""


SCHEMA = 7
_Loader = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
_BatchId = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


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
    part_limit: Annotated[int, Field(ge=1)] | None = None
    """Largest number of samples of a micro-batch, or None while all batches have fitted."""
    shrinks: NonNegativeInt = 0
    """Number of times that memory ran out with parts smaller than all parts before."""
    part_growth: PartGrowth = field(default_factory=PartGrowth)
    """When larger parts are tried again."""
    evaluation_limit: Annotated[int, Field(ge=1)] | None = None
    """Largest number of samples that the `loss_fn` evaluates at a time in a comparison of weights,
    or None for no limit besides `part_limit`."""
    evaluation_growth: PartGrowth = field(default_factory=PartGrowth)
    """When the `loss_fn` tries larger parts again."""
    passes: NonNegativeInt = 0
    """Largest number of calls of `batches` in a process of the run."""
    changes: list[StructureChange] = field(default_factory=list)
    """Changes of the structure of the model, oldest first, at most `MAX_CHANGES`."""
    param_groups: dict[str, list[list[str]]] = field(default_factory=dict)
    """Optimizer -> names of the parameters of each group, after a change; else empty."""
    trials: Trials | None = None
    """What the rollbacks for the newest trouble have changed, or None without a rollback."""

    # -- at the step of the checkpoint
    step: NonNegativeInt = 0
    """Number of steps done."""
    world: Annotated[int, Field(ge=1)] = 1
    """Number of ranks."""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of an engine -> its `Engine.to_dict`."""
    ledger: Ledger = field(default_factory=Ledger)
    """Incidents, rollbacks and unhealthy steps."""
    monitor: MonitorState = field(default_factory=MonitorState)
    """What decisions read of earlier steps besides the ledger."""
    skipped: dict[_Loader, list[_BatchId]] = field(default_factory=dict)
    """Number of a loader -> ids of the batches that the loader skips."""
    forward: dict[_Loader, dict[str, Any]] = field(default_factory=dict)
    """Number of a loader that cannot be rewound -> its position, which a rollback keeps."""
    comparisons: ComparisonState | None = None
    """Evidence of the comparisons of weights, or None without a `loss_fn`."""
    is_in_body: bool = False
    """Whether the program saved in the body of its loop. The work between two steps that follows
    `step` was not done then."""
    last_regular: int | None = None
    """Step of the last regular save, or None in a checkpoint of an older version."""

    def add_change(self, step: int, epoch: int) -> None:
        """Adds a change of the structure of the model, and drops the oldest of too many.

        Args:
            step: first step with the new structure.
            epoch: epoch of this step.
        """
        self.changes.append(StructureChange(step, epoch))
        del self.changes[:-MAX_CHANGES]

    @property
    def attempt_history(self) -> AttemptHistory:
        """The attempts of the run, and the step up to which checkpoints are known-good.

        With it, the store distinguishes checkpoints of the current attempt from abandoned
        checkpoints, which a rollback has undone.
        """
        return AttemptHistory(tuple(self.attempts), self.known_good_up_to)

    def repeats_undone_steps(self, step: int) -> bool:
        """Whether a start from checkpoint `step` repeats steps that the last rollback undid.

        It does up to the target of this rollback. A later checkpoint was saved after the rollback.

        A restart at such a step repeats what a rollback has begun, and has to change the same
        things.

        Args:
            step: step of the checkpoint that is restored.
        """
        rollbacks = self.ledger.in_force
        return bool(rollbacks) and rollbacks[-1].continues_at >= step

    def continue_from(self, saved: RunRecord) -> None:
        """Takes over the facts of an earlier process. The run is not completed any more.

        The ledger and the monitor's state stay: other parts of the run refer to these objects, so
        they are continued in place.

        Args:
            saved: the newest record of the run.
        """
        take_fields(self, saved, keep=("ledger", "monitor"))
        self.completed = False

    def trials_for(self, onset: int, probation: int) -> Trials | None:
        """The trials so far for the trouble that begins at a step, or None if it is a new trouble.

        The last trouble was healed, so that a later trouble is another one, if `probation` steps
        have passed since the step at which its last rollback began.

        Args:
            onset: step at which the trouble begins.
            probation: healthy steps after which a checkpoint is known-good.
        """
        rollbacks = self.ledger.in_force
        if self.trials is None or not rollbacks or onset > rollbacks[-1].step + probation:
            return None
        return self.trials

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-safe values, with the version `SCHEMA` of its format.

        A checkpoint holds the result. `RunRecord.of` reads it, and raises if the version is not its
        own: a record that was understood in part could lead to a wrong decision.
        """
        content = {**asdict(self), "schema": SCHEMA}
        content["ledger"]["rollbacks"] = [each.to_saved() for each in self.ledger.rollbacks]
        return content

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
        ledger = content.get("ledger")
        if isinstance(ledger, Mapping) and isinstance(ledger.get("rollbacks"), Sequence):
            rollbacks = [nested(each) for each in ledger["rollbacks"]]
            content["ledger"] = {**ledger, "rollbacks": rollbacks}
        return _RECORD.validate_json(json.dumps(content), strict=True)


_RECORD = TypeAdapter(RunRecord)
