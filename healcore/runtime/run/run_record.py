"""What a checkpoint holds besides the state: `RunRecord` with `Ledger`; see also `data_state`.

A restart reads the budgets, the learning-rate multiplier and the skipped batches from the record of
the checkpoint that it resumes. A rollback replaces the record of the checkpoint that it restores.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter

from healcore.core.decision import NONFINITE, Cause, names_of
from healcore.core.step_record import StepRecord
from healcore.runtime.run.batch_parts import PartGrowth
from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.monitor_state import MonitorState, NumberOrNone, take_fields
from healcore.runtime.run.orders import RollbackRecord, nested
from healcore.runtime.store.checkpoints import AttemptHistory, StoreError

_MAX_INCIDENTS = 1000
"""Max incidents in the ledger; the oldest are dropped."""
MAX_CHANGES = 100
"""Changes of the structure of the model to remember: a cloud of Gaussians changes it often."""


@dataclass
class IncidentRecord:
    """One incident, from the step of its first alarm (`onset`) to its latest alarm (`last`).

    Alarms that follow one another closely have one cause, so they are reported and answered once. A
    rollback and a restart end the incident that is open.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    number: int
    """Number of the incident, from 1 over the whole run. A rollback does not reset the count."""
    onset: int
    """Step of the first alarm."""
    last: int
    """Step of the latest alarm."""
    cause: int
    """`Cause` flags of all alarms."""
    first: dict[str, int] = field(default_factory=dict)
    """Name of a cause -> first step with this cause."""
    alarms: int = 0
    """Number of steps with an alarm."""
    skips: int = 0
    """Number of these steps that were skipped."""
    over: bool = False
    """Whether the engine has closed the incident, so that the next alarm opens another one."""
    reported_over: bool = False
    """Whether its event `over` was written."""
    number_in_engine: NumberOrNone = 0
    """The engine's number of this incident, or None if the engine's count has restarted since."""
    engine: str = ""
    """Name of the optimizer with the first alarm, or "" in a checkpoint of an older version."""

    @property
    def only_skips(self) -> bool:
        """Whether each alarm is a skipped step that was not finite, which changed no weights.

        A finite step within such an incident shows that the weights were finite there. If an order
        follows later, its trouble begins at the first of the last consecutive skips, and not at the
        incident's first alarm.
        """
        return self.skips == self.alarms and not Cause(self.cause) & ~NONFINITE

    def add(self, index: int, causes: int) -> None:
        """Adds an alarm.

        Args:
            index: index of the step.
            causes: `Cause` flags of the alarm.
        """
        self.last = index
        self.alarms += 1
        self.cause |= causes
        for name in names_of(Cause(causes)):
            self.first.setdefault(name, index)


@dataclass
class Ledger:
    """The host's record of a run: which steps were healthy, and how the rest was treated.

    `add_step` adds the steps in order. A rollback rewinds the ledger to the restored step, but
    keeps the incidents, rollbacks and skips of the undone steps: budgets count them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    next_step: int = 0
    """Index of the step after the newest one."""
    unhealthy: list[int] = field(default_factory=list)
    """Steps that were skipped, were not taken, or had an alarm within an incident; also micro-steps
    directly after such a step. Ascending."""
    incidents: list[IncidentRecord] = field(default_factory=list)
    """The newest incidents, oldest first."""
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    """All rollbacks, oldest first; see `RollbackRecord.outline`."""
    incident_count: int = 0
    """Number of incidents so far, including undone and dropped incidents."""
    skips: int = 0
    """Number of skipped steps so far, including undone steps."""
    untrained: int = 0
    """Number of steps in which no optimizer took a step, excluding undone steps."""
    open: bool = False
    """Whether an incident with more than skipped non-finite steps is open."""
    accepted: int = 0
    """Number of troubles accepted in a row, see `Trial.ACCEPT`."""
    spent: int = 0
    """Rollbacks that the engine had made before this run, in another framework."""
    accepted_until: int = 0
    """Step before which no comparison rolls back again."""
    last_alarms: dict[str, int] = field(default_factory=dict)
    """Optimizer and cause, as in `actor/PLATEAU` -> last step with this cause."""

    def add_step(
        self, index: int, records: Sequence[StepRecord], opening: int = -1
    ) -> IncidentRecord | None:
        """Adds the records of one step.

        Args:
            index: index of the step.
            records: its records, one per engine, or more if an engine judged several times.
            opening: `Cause` flags that open an incident. All other alarms only alert.

        Returns:
            The incident that the step belongs to, or None.
        """
        self.next_step = index + 1
        judged = is_open = skip = False
        all_skip = True
        cause = 0
        engine = ""  # of the first alarm
        for record in records:
            judged |= record.judged
            is_open |= record.incident_open
            skip |= record.skip
            all_skip &= record.skip
            # An alert alone (a clipped gradient spike) opens no incident.
            if record.incident_open or record.skip:
                cause |= int(record.cause) & opening
                if cause and not engine:
                    engine = record.engine
        if not judged:
            if not records[0].taken:
                self.unhealthy.append(index)
                self.skips += 1
                self.untrained += 1
                return None
            # A micro-step of an optax.MultiSteps around protect neither ends an incident nor a row
            # of unhealthy steps: the next update decides.
            if self.unhealthy and self.unhealthy[-1] == index - 1:
                self.unhealthy.append(index)
            return None
        self.open = is_open
        if not cause:
            if self.incidents and not is_open:
                self.incidents[-1].over = True
            # Frozen steps have no cause, but they train nothing.
            self.skips += skip
            return None
        self.unhealthy.append(index)
        incident = self._current(index, records, skip and not Cause(cause) & ~NONFINITE)
        incident.engine = incident.engine or engine
        incident.add(index, cause)
        incident.skips += skip
        self.skips += skip
        self.untrained += all_skip
        return incident

    def _current(self, index: int, records: Sequence[StepRecord], harmless: bool) -> IncidentRecord:
        """Finds or opens an alarm's incident. An incident of nothing but skips takes no other."""
        last = None
        if self.incidents:
            last = self.incidents[-1]
        number = max(record.incident for record in records)
        same = last is not None and not last.over
        if last is not None and last.only_skips:
            same = harmless and number == last.number_in_engine
        if last is None or not same:
            if last is not None:
                last.over = True
            self.incident_count += 1
            last = IncidentRecord(self.incident_count, index, index, 0, number_in_engine=number)
            self.incidents.append(last)
            del self.incidents[:-_MAX_INCIDENTS]
        last.over = False
        return last

    @property
    def in_force(self) -> list[RollbackRecord]:
        """The rollbacks that no start has undone after a stop, oldest first."""
        return [each for each in self.rollbacks if not each.undone]

    def same_trouble(self, onset: int, within: int = 0) -> list[RollbackRecord]:
        """The earlier rollbacks for the trouble that begins at step `onset`, oldest first.

        The trouble is the same if its onset is at most `within` steps after the step at which the
        rollback began. Revivals of a dead run are not counted: their weights were finite, and
        they have answers of their own (`dead_run`).

        Args:
            onset: step at which the trouble begins.
            within: number of steps by which the onset may be later.
        """
        found: list[RollbackRecord] = []
        for rollback in self.in_force:
            if not rollback.order.changes.revival and onset <= rollback.step + within:
                found.append(rollback)
        return found

    def unhealthy_between(self, first: int, end: int) -> list[int]:
        """The unhealthy steps of a range, ascending.

        Args:
            first: the first step of the range.
            end: the step after the last step of the range.
        """
        steps = self.unhealthy
        return steps[bisect.bisect_left(steps, first) : bisect.bisect_left(steps, end)]

    def healthy_steps(self, first: int, end: int) -> int:
        """Number of healthy steps from `first` to before `end`.

        Unhealthy steps do not restart the count: otherwise no checkpoint would become known-good in
        a run that skips a bad batch now and then.

        Args:
            first: the first step that counts.
            end: the step after the last step that counts.
        """
        return end - first - len(self.unhealthy_between(first, end))

    def first_consecutive(self, index: int) -> int:
        """First of the consecutive unhealthy steps that end at a step.

        The trouble of the step has begun there.

        Args:
            index: the last of the steps.

        Returns:
            The first step, or `index + 1` if the step itself is healthy.
        """
        at = bisect.bisect_right(self.unhealthy, index)
        while at > 0 and self.unhealthy[at - 1] == index:
            at -= 1
            index -= 1
        return index + 1

    def on_rollback(self, rollback: RollbackRecord, saved: Ledger | None) -> None:
        """Records a rollback that was carried out.

        Args:
            rollback: the rollback. The ledger continues where the run does.
            saved: the ledger in the restored checkpoint, or None if the checkpoint has no ledger.
        """
        if self.rollbacks:
            self.rollbacks[-1] = self.rollbacks[-1].outline()
        self.rollbacks.append(rollback)
        self._rewind(rollback.continues_at, saved)

    def forget(self, before: int) -> None:
        """Drops unhealthy steps before a step, except consecutive ones up to the newest step.

        Args:
            before: step before which no checkpoint is left, so that nothing asks for the steps.
        """
        before = min(before, self.first_consecutive(self.next_step - 1))
        del self.unhealthy[: bisect.bisect_left(self.unhealthy, before)]

    def continue_from(self, saved: Ledger, step: int) -> None:
        """Continues the ledger of an earlier process.

        Args:
            saved: the ledger in the checkpoint that the run resumes from.
            step: step of this checkpoint.
        """
        take_fields(self, saved)
        self._rewind(step, None)

    def without_trials(self, trials: Trials, saved: Ledger) -> Ledger:
        """The ledger after a stop: the rollbacks for the trouble of the stop count no longer.

        Incidents, skips and the rollbacks themselves stay in the counts of the run.

        Args:
            trials: what the rollbacks have changed.
            saved: the ledger in the checkpoint that the run resumes from.
        """
        rollbacks = self.rollbacks[: trials.first]
        for each in self.rollbacks[trials.first :]:
            rollbacks.append(replace(each.outline(), undone=True))
        return replace(
            self,
            rollbacks=rollbacks,
            accepted=trials.accepted,
            accepted_until=trials.accepted_until,
            untrained=saved.untrained,
        )

    def _rewind(self, step: int, saved: Ledger | None) -> None:
        """Continues at a step, and closes the incident that was open."""
        self.next_step = step
        self.open = False
        del self.unhealthy[bisect.bisect_left(self.unhealthy, step) :]
        # A cause that lasted until the rollback still lasts, if it comes again.
        self.last_alarms = {name: min(last, step - 1) for name, last in self.last_alarms.items()}
        if self.incidents:
            self.incidents[-1].over = True
            self.incidents[-1].number_in_engine = None
        if saved is not None:
            self.untrained = saved.untrained


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


SCHEMA = 6
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
    unread: str = ""
    """The steps before `step` that the run had not acted on, see
    `checkpoints/unread_steps.py`; or empty."""
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

        With it, the store tells checkpoints of the current attempt from abandoned ones, which a
        rollback has undone.
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
