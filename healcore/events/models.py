"""Defines the fields of an event and of a line of the metrics, as pydantic models.

The JSON Schema, the tables in docs/events.md and all readers use them. Nothing is validated when an
event is written: a value of the wrong type is better in the file than lost.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from healcore.core.verdict import Action, Cause

NONFINITE = ("nan", "inf", "-inf")
"""Numbers that JSON does not have, as strings that `float` takes."""

LARGEST = 2**53
"""Readers that have only doubles round larger numbers."""


class Ending(enum.StrEnum):
    """How a process ends."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    INTERRUPTED = "interrupted"
    REQUESTED = "requested"
    """By a stop file, or by a `break` before the end of the epochs that the loop asked for."""
    KILLED = "killed"


class RollbackOutcome(enum.StrEnum):
    """`outcome` of an event of the kind `rollback`."""

    DONE = "done"
    TRIAL = "trial"
    """Taken again from a snapshot, to see whether the fault comes again."""
    AFTER_CRASH = "after_crash"
    """A kill interrupted it, and the next process finished it."""


class RerunVerdict(enum.StrEnum):
    """`outcome` of an event of the kind `verdict`: what a re-run of the step showed."""

    TRANSIENT = "transient"
    REPRODUCIBLE = "reproducible"


# -- types: the title is their name in docs/events.md ---------------------------------------------


def _names(flags: type[Cause] | type[Action]) -> Any:
    known = [str(each.name) for each in flags]

    def check(names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"each name is one of {', '.join(known)}, not {unknown[0]!r}")
        return names

    items = {"type": "string", "enum": known}
    return AfterValidator(check), WithJsonSchema({"type": "array", "items": items})


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NONFINITE else value


Whole = Annotated[int, Field(ge=0, le=LARGEST, title="whole number")]
WholeFromOne = Annotated[int, Field(ge=1, le=LARGEST, title="whole number from 1")]
Text = Annotated[str, Field(title="text")]
Truth = Annotated[bool, Field(title="true or false")]
Seconds = Annotated[float, Field(allow_inf_nan=False, title="seconds")]
Number = Annotated[
    float,
    BeforeValidator(_number),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": list(NONFINITE)}]}),
    Field(title="number"),
]
MaybeNumber = Annotated[Number | None, Field(title="number, or null")]
MaybeWhole = Annotated[Whole | None, Field(title="whole number, or null")]
Time = Annotated[
    str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$", title="date and time")
]
Texts = Annotated[list[str], Field(title="array of texts")]
Versions = Annotated[dict[str, str], Field(title="object of texts")]
Causes = Annotated[list[str], *_names(Cause), Field(title="array of causes")]
Actions = Annotated[list[str], *_names(Action), Field(title="array of actions")]
BatchPair = Annotated[list[Whole], Field(min_length=2, max_length=2)]
BatchList = Annotated[list[BatchPair], Field(title="array of `[epoch, index]`")]


class _EventsModel(BaseModel):
    # Fields that a later version adds are ignored.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class ReadingsRecord(_EventsModel):
    """`healcore.core.step_record.Readings`."""

    loss: Number
    grad_norm: Number
    threshold: Number
    z: Number
    z_loss: Number


class EvidenceRecord(_EventsModel):
    """`healcore.core.evidence.Evidence`."""

    name: Text
    grad_norm: Number


class StacksRecord(_EventsModel):
    """`healcore.runtime.postmortem.postmortem.RankStacks`."""

    ranks: Annotated[list[Whole], Field(min_length=1)]
    stacks: Text


class RankRecord(_EventsModel):
    """What one rank has seen or proposes."""

    rank: Whole
    outcome: Text | None = None
    why: Text | None = None
    loss: Number | None = None
    grad_norm: Number | None = None


ReadingsField = Annotated[
    ReadingsRecord, Field(title="`{loss, grad_norm, threshold, z, z_loss}`, numbers")
]
OfRanks = Annotated[
    list[RankRecord], Field(title="array of `{rank, outcome, why}` or `{rank, loss, grad_norm}`")
]
EvidenceList = Annotated[list[EvidenceRecord], Field(title="array of `{name, grad_norm}`")]
StacksList = Annotated[list[StacksRecord], Field(title="array of `{ranks, stacks}`")]
EndingName = Annotated[Ending, Field(strict=False)]  # from its text


def _may(about: str) -> Any:
    """A field that any event may have. None: it is not in the file, which has no null there."""
    return Field(default=None, description=about)


def _has(about: str) -> Any:
    return Field(description=about)


class EventHead(_EventsModel):
    """What every event has."""

    schema_: WholeFromOne = Field(alias="schema", description="Version of the format: 2.")
    seq: Whole = _has(
        "Counts events, also those that could not be written; continues from the file's last."
    )
    run: Text = _has("Id of the run: of one process, from its start to its end.")
    time: Time = _has("Wall time, ISO 8601, UTC.")
    mono: Seconds = _has("Monotonic clock, for durations within one run.")
    kind: Text = _has("What happened; see below.")
    step: MaybeWhole = _has("Index of the optimizer step, from 0.")


class EventFields(_EventsModel):
    """What any event may have. `schema.KINDS` lists which ones a kind always has.

    A field means the same, and has the same type, in every kind of event.
    """

    lost: WholeFromOne = _may("Events before this one that could not be written.")
    # What was seen.
    incident: Whole = _may("Number of the incident that it is part of; 0: of none.")
    onset: Whole = _may("Step of its first alarm.")
    engine: Text = _may("The optimizer's name in the state, where there are several.")
    cause: Causes = _may("Why something is wrong.")
    readings: ReadingsField = _may("The numbers behind it; the last finite loss and norm.")
    evidence: EvidenceList = _may("Tensors whose gradients stood out, the worst first.")
    batches: BatchList = _may("The step's batches, or those that were left out.")
    # What was done.
    action: Actions = _may("What is done about it on the host.")
    ordered: Actions = _may("What the policy had ordered, where a hook overrode it.")
    observed: Truth = _may("True: nothing is done, the policy only observes.")
    skip: Truth = _may("The step was skipped within the step.")
    grad_scale: Number = _may("Factor on the step's gradients.")
    lr_scale_before: Number = _may("The learning-rate multiplier until now.")
    lr_scale: Number = _may("The learning-rate multiplier from now on.")
    lr: Number = _may("The schedule's learning rate at `step`, without the multiplier.")
    lr_limit: Number = _may("The learning rate that a cut lets the run have at most, for now.")
    lr_at_fault: Number = _may("The learning rate in force at which the run broke, if a rate has.")
    number: WholeFromOne = _may("Of the rollback, over the whole run.")
    depth: Whole = _may("How many known-good checkpoints to go back.")
    checkpoint: Whole = _may("Step of the checkpoint that was used, or that the event is about.")
    repeated: Truth = _may("An earlier rollback went there too, and nothing is older.")
    initial: Truth = _may("It is the snapshot that the run started from.")
    moments_reset: Truth = _may("The optimizers' moments are as at the start of a run.")
    rewound: Truth = _may("The data was rewound; false: it goes on forward.")
    outcome: Text = _may(
        f"The result. Of a rollback: {', '.join(RollbackOutcome)}; of a re-run: "
        f"{', '.join(RerunVerdict)}; of the data: a sentence."
    )
    why: Text = _may("The reason, as text.")
    problem: Text = _may("What went wrong, as text.")
    verdict: Literal["damage", "worse", "recovered", "unknown"] = _may(
        "Whether the model was found to be worse; worse: earlier weights are better, and the run "
        "has time to recover; unknown: damage and different data would both look like this, or the "
        "current weights are not shown to be worse."
    )
    by: Literal[
        "weights",
        "earlier_weights",
        "repetition",
        "budget",
        "nothing",
    ] = _may("What the verdict is based on.")
    rise: MaybeNumber = _may(
        "Loss of the step's batch with the current weights, minus that with the earlier ones."
    )
    rise_remembered: MaybeNumber = _may("The same for a batch trained on since the earlier ones.")
    sign: Text = _may("What an exception was recognised by: its type, an HTTP status, an errno.")
    answer: Text = _may("What is done about a fault: a word of the policy's `do`.")
    attempt: WholeFromOne = _may("Number of the attempt at a network call.")
    wait_s: Seconds = _may("Seconds until the next attempt.")
    samples: WholeFromOne = _may("Samples of the batch.")
    size_before: WholeFromOne = _may("Samples in its largest part until now.")
    size: WholeFromOne = _may("Samples in its largest part from now on.")
    bytes: Whole = _may("What could not be allocated, where the message says it.")
    hook: Text = _may("Name of the hook.")
    seconds: Seconds = _may("How long it took; of a hang, how long it has lasted.")
    stacks: StacksList = _may(
        "Python stacks of a run that hangs; once for ranks that stand at the same place."
    )
    diagnosis: Text = _may("For a person, in plain words.")
    severity: Literal["warning", "error"] = _may(
        "Whether the run can go on as it is; an error loses it."
    )
    references: Texts = _may("Where the answer to the cause is published.")
    # The run.
    host: Text = _may("Host name.")
    pid: Whole = _may("Process number.")
    boot: Text = _may("The kernel's id of the boot.")
    born: Whole = _may("When the process began, in clock ticks from the boot.")
    environment: Versions = _may("Versions: healcore, Python, system, frameworks.")
    policy: Text = _may("Name of the policy.")
    fingerprint: Text = _may("Of the policy.")
    policy_toml: Text = _may("The policy as TOML, with every key.")
    mode: Literal["heal", "observe"] = _may("Of the policy.")
    framework: Literal["torch", "jax"] = _may("Framework of the run.")
    store: Text = _may("Where checkpoints go.")
    lag: Whole = _may("Steps after which a step's numbers are read.")
    save_every: WholeFromOne = _may("Steps between saves.")
    rank: Whole = _may("Number of this process in the run.")
    world: WholeFromOne = _may("How many processes the run has.")
    of_ranks: OfRanks = _may("What each of the processes has seen or proposes, where they differ.")
    ending: EndingName = _may("How the process ended.")
    resumes: Truth = _may("There are checkpoints of an earlier process to go on from.")
    unreported_alarms: WholeFromOne = _may("Alarms without an event of their own.")
    incidents: Whole = _may("Incidents so far.")
    rollbacks: Whole = _may("Rollbacks so far.")
    last_good: Whole = _may("Step of the newest known-good checkpoint.")


class EventModel(EventFields, EventHead):
    """One event as it is written."""


class EventRecord(EventFields):
    """One event as it is read, without values of the wrong type.

    `log.parse` guarantees `seq`, `run` and `kind`. Any other field may be None: a file may be
    damaged, edited, or of a newer healcore.
    """

    seq: Whole = 0
    run: Text = ""
    kind: Text = ""
    step: MaybeWhole = None
    time: Time = _may("Wall time.")
    mono: Seconds = _may("Monotonic clock.")


_NAMED = frozenset({"cause", "action", "ordered"})
"""Lists of names, which may hold those of a newer healcore."""


def record(event: Mapping[str, Any]) -> tuple[EventRecord, list[str]]:
    """An event from `log.parse` without values of the wrong type, and the names of their fields."""
    try:
        return EventRecord.model_validate(event), []
    except ValidationError as error:
        wrong = {str(each["loc"][0]) for each in error.errors(include_url=False)}
    names = {
        name: event[name]
        for name in wrong & _NAMED
        if isinstance(event[name], list) and all(isinstance(each, str) for each in event[name])
    }
    rest = {name: value for name, value in event.items() if name not in wrong}
    found = EventRecord.model_validate(rest).model_copy(update=names)
    return found, [name for name in event if name in wrong - names.keys()]


# -- metrics --------------------------------------------------------------------------------------


class MetricsModel(_EventsModel):
    """A line of the metrics file: one step of one engine."""

    schema_: WholeFromOne = Field(alias="schema", description="Version of the format: 1.")
    kind: Literal["step"] = _has("What the line is.")
    run: Text = _has("The run's id, as in its events.")
    time: Seconds = _has("Wall time since 1970.")
    step: Whole = _has(
        "Index of the optimizer step, from 0. When it goes back, the run went back, or was "
        "restarted: what follows replaces the lines from that step on."
    )
    every: WholeFromOne = _may(
        "Steps that a line stands for, where the file is thinned; absent: one."
    )
    engine: Text = _may("The optimizer's name in the state, where there are several.")
    loss: Number = _may(
        'As judged; "nan" stands for Inf too. Absent: not given, or something else (a GradScaler) '
        "skipped the step."
    )
    grad_norm: Number = _may("As judged, like `loss`.")
    threshold: Number = _has("As in an event's `readings`; 0: none is in force.")
    z: Number = _has("As in an event's `readings`.")
    z_loss: Number = _has("As in an event's `readings`.")
    grad_scale: Number = _has("Factor on the step's gradients.")
    lr_scale: Number = _has("The learning-rate multiplier.")
    skip: Truth = _has("The step was skipped within the step.")
    cause: Causes = _has("Why something is wrong.")
    action: Actions = _has("What is done about it on the host.")
