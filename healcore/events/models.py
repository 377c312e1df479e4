"""Defines the fields of an event and of a line of the metrics, as pydantic models.

The JSON Schema, the tables in docs/events.md and all readers use them. Nothing is validated when an
event is written, so that a value of the wrong type is not lost.
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
"""Numbers that JSON does not have, as strings that `float` reads."""

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
    """A re-run from a snapshot, to see whether the fault is transient."""
    AFTER_CRASH = "after_crash"
    """A kill interrupted the rollback, and the next process finished it."""


class RerunVerdict(enum.StrEnum):
    """`outcome` of an event of the kind `verdict`: what a re-run of the step showed."""

    TRANSIENT = "transient"
    REPRODUCIBLE = "reproducible"


# -- types: the title is the name of the type in docs/events.md -----------------------------------


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
    # Fields of later versions are ignored.
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
    """What one rank has observed or proposes."""

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
EndingName = Annotated[Ending, Field(strict=False)]  # reads the text of the enum


def _may(about: str) -> Any:
    """A field that any event may have; None if the field is absent."""
    return Field(default=None, description=about)


def _has(about: str) -> Any:
    return Field(description=about)


class EventHead(_EventsModel):
    """Fields of every event."""

    schema_: WholeFromOne = Field(alias="schema", description="Version of the format: 2.")
    seq: Whole = _has(
        "Number of the event, including lost events; continues from the last event in the file."
    )
    run: Text = _has("Id of the process that writes the events.")
    time: Time = _has("Wall time, ISO 8601, UTC.")
    mono: Seconds = _has("Monotonic clock, for durations within one run.")
    kind: Text = _has("Kind of the event, see below.")
    step: MaybeWhole = _has("Index of the optimizer step, from 0.")


class EventFields(_EventsModel):
    """Fields that any event may have. `schema.KINDS` lists the required fields of each kind.

    A field has the same meaning and type in every kind.
    """

    lost: WholeFromOne = _may("Number of events before this event that could not be written.")
    # What was seen.
    incident: Whole = _may("Number of the incident; 0 outside of incidents.")
    onset: Whole = _may("Step of the first alarm.")
    engine: Text = _may("The optimizer's name in the state, where there are several.")
    cause: Causes = _may("Causes of the alarm.")
    readings: ReadingsField = _may("The numbers that were judged; the last finite loss and norm.")
    evidence: EvidenceList = _may("Tensors whose gradients stood out, the worst first.")
    batches: BatchList = _may("Batches of the step, or the skipped batches.")
    # What was done.
    action: Actions = _may("Actions on the host.")
    ordered: Actions = _may("Order of the policy that a hook has overridden.")
    observed: Truth = _may("true: the policy only observes, and nothing is done.")
    skip: Truth = _may("The update of the step was skipped.")
    grad_scale: Number = _may("Factor on the step's gradients.")
    lr_scale_before: Number = _may("Earlier learning-rate multiplier.")
    lr_scale: Number = _may("New learning-rate multiplier.")
    lr: Number = _may("The schedule's learning rate at `step`, without the multiplier.")
    lr_limit: Number = _may("Upper limit of the learning rate after a cut.")
    lr_at_fault: Number = _may(
        "Learning rate at which the run broke, if a learning rate is the cause."
    )
    number: WholeFromOne = _may("Number of the rollback in the whole run.")
    depth: Whole = _may("How many known-good checkpoints the rollback goes back.")
    checkpoint: Whole = _may(
        "Step of the restored checkpoint, or of the checkpoint that the event is about."
    )
    repeated: Truth = _may("An earlier rollback restored the same checkpoint, and none is older.")
    initial: Truth = _may("The checkpoint is the snapshot from the start of the run.")
    moments_reset: Truth = _may("The moments of the optimizers were reset.")
    rewound: Truth = _may("The data was rewound; false: the data continues forward.")
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
    ] = _may("Basis of the verdict.")
    rise: MaybeNumber = _may(
        "Loss of the step's batch with the current weights minus the loss with the earlier weights."
    )
    rise_remembered: MaybeNumber = _may(
        "The same for a batch that was trained on since the earlier weights."
    )
    sign: Text = _may("How an exception was recognized: its type, an HTTP status, an errno.")
    answer: Text = _may("Response to a fault: a word of the policy's `do`.")
    attempt: WholeFromOne = _may("Number of the attempt at a network call.")
    wait_s: Seconds = _may("Seconds until the next attempt.")
    samples: WholeFromOne = _may("Samples of the batch.")
    size_before: WholeFromOne = _may("Samples in the largest part, earlier.")
    size: WholeFromOne = _may("Samples in the largest part, from now on.")
    bytes: Whole = _may("Bytes that could not be allocated, if the message has them.")
    hook: Text = _may("Name of the hook.")
    seconds: Seconds = _may("Duration; of a hang, the duration so far.")
    stacks: StacksList = _may(
        "Python stacks of a run that hangs; ranks at the same place share an entry."
    )
    diagnosis: Text = _may("For a person, in plain words.")
    severity: Literal["warning", "error"] = _may(
        "`warning`: the run can continue; `error`: the run is lost."
    )
    references: Texts = _may("Publications about the response to the cause.")
    # The run.
    host: Text = _may("Host name.")
    pid: Whole = _may("Process number.")
    boot: Text = _may("The kernel's id of the boot.")
    born: Whole = _may("Start of the process, in clock ticks from the boot.")
    environment: Versions = _may("Versions: healcore, Python, system, frameworks.")
    policy: Text = _may("Name of the policy.")
    fingerprint: Text = _may("Fingerprint of the policy.")
    policy_toml: Text = _may("The policy as TOML, with every key.")
    mode: Literal["heal", "observe"] = _may("Mode of the policy.")
    framework: Literal["torch", "jax"] = _may("Framework of the run.")
    store: Text = _may("Where checkpoints go.")
    lag: Whole = _may("Steps after which a step's numbers are read.")
    save_every: WholeFromOne = _may("Steps between saves.")
    rank: Whole = _may("Number of this process in the run.")
    world: WholeFromOne = _may("Number of processes of the run.")
    of_ranks: OfRanks = _may("What each process has observed or proposes, where they differ.")
    ending: EndingName = _may("How the process ended.")
    resumes: Truth = _may("The run continues from checkpoints of an earlier process.")
    unreported_alarms: WholeFromOne = _may("Number of alarms without an own event.")
    incidents: Whole = _may("Incidents so far.")
    rollbacks: Whole = _may("Rollbacks so far.")
    last_good: Whole = _may("Step of the newest known-good checkpoint.")


class EventModel(EventFields, EventHead):
    """One event as it is written."""


class EventRecord(EventFields):
    """One event as it is read, without values of the wrong type.

    `log.parse` guarantees `seq`, `run` and `kind`. Any other field may be None, because a file may
    be damaged, edited, or written by a newer healcore.
    """

    seq: Whole = 0
    run: Text = ""
    kind: Text = ""
    step: MaybeWhole = None
    time: Time = _may("Wall time.")
    mono: Seconds = _may("Monotonic clock.")


_NAMED = frozenset({"cause", "action", "ordered"})
"""Lists of names, which may contain names of a newer healcore."""


def record(event: Mapping[str, Any]) -> tuple[EventRecord, list[str]]:
    """Validates an event from `log.parse`. Returns it without invalid fields, and their names."""
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
    kind: Literal["step"] = _has("Kind of the line.")
    run: Text = _has("Id of the run, as in its events.")
    time: Seconds = _has("Wall time since 1970.")
    step: Whole = _has(
        "Index of the optimizer step, from 0. A smaller step than before follows a rollback or a "
        "restart: the new lines replace the lines from that step on."
    )
    every: WholeFromOne = _may(
        "Number of steps that the line stands for in a thinned file; 1 if absent."
    )
    engine: Text = _may("The optimizer's name in the state, where there are several.")
    loss: Number = _may(
        'As judged; "nan" stands for Inf too. Absent if not given, or if something else (a '
        "GradScaler) skipped the step."
    )
    grad_norm: Number = _may("As judged, like `loss`.")
    threshold: Number = _has("As in an event's `readings`; 0 without a limit.")
    z: Number = _has("As in an event's `readings`.")
    z_loss: Number = _has("As in an event's `readings`.")
    grad_scale: Number = _has("Factor on the step's gradients.")
    lr_scale: Number = _has("The learning-rate multiplier.")
    skip: Truth = _has("The update of the step was skipped.")
    cause: Causes = _has("Causes of the alarm.")
    action: Actions = _has("Actions on the host.")
