"""`EventRecord` and its parts: the fields of an event, as pydantic models.

The JSON Schema, the tables in docs/events.md and all readers use these models. The log does not
validate the events that it writes, so that no event is lost because of a wrong type.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from healcore.events.kinds import SCHEMA

NONFINITE_TEXTS = ("nan", "inf", "-inf")
"""Numbers that JSON cannot express, as strings that `float` reads."""

_MAX_INT = 2**53  # largest whole number. Readers with only 64-bit floats round larger numbers.


class Ending(enum.StrEnum):
    """How a process ends, or what a reader concludes about a process without an event `end`."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    INTERRUPTED = "interrupted"
    REQUESTED = "requested"
    """Ended by a stop file, or by a `break` before the last requested epoch ended."""
    ENDED = "ended"
    """In a way that this version of healcore does not know."""
    GONE = "gone"
    """The process no longer exists and has written no event `end`."""
    RUNNING = "running"
    UNKNOWN = "unknown"
    """No event `end`, and whether the process exists is unknown, for example on another host."""


# -- types ----------------------------------------------------------------------------------------


def _parse_nonfinite(value: object) -> object:
    if isinstance(value, str) and value in NONFINITE_TEXTS:
        return float(value)
    return value


Int = Annotated[int, Field(ge=0, le=_MAX_INT)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[
    float,
    BeforeValidator(_parse_nonfinite),
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"type": "string", "enum": list(NONFINITE_TEXTS)}]}
    ),
]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")]
Texts = list[str]
Batches = list[Annotated[list[Int], Field(min_length=2, max_length=2)]]
Rows = list[list[int]]
Objects = list[dict[str, Any]]


class _EventsModel(BaseModel):
    # Fields of later versions are ignored.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class ReadingsRecord(_EventsModel):
    """JSON form of `healcore.core.step_record.Readings`."""

    loss: Number
    grad_norm: Number
    threshold: Number
    z: Number
    z_loss: Number


class EvidenceRecord(_EventsModel):
    """JSON form of `healcore.core.step_record.SuspectGradient`."""

    name: str
    grad_norm: Number


def _maybe(description: str) -> Any:
    """An optional field: None if the event does not have it."""
    return Field(default=None, description=description)


class EventRecord(_EventsModel):
    """An event from a file, without values of the wrong type.

    A field has the same meaning and type in every kind; `kinds.KINDS` lists the required fields of
    each kind. `events.read` guarantees `seq`, `run` and `kind`. Any other field may be None: the
    file may be damaged, edited, or written by a newer healcore.

    The record is made by `validate`, and is immutable. The description of each field is the text in
    docs/events.schema.json.
    """

    schema_: Int = Field(
        default=SCHEMA, alias="schema", description=f"Version of the format: {SCHEMA}."
    )
    seq: Int = Field(
        default=0, description="Number of the event in its process, from 0, counting lost events."
    )
    run: str = Field(default="", description="Id of the process that writes the events.")
    time: Time = _maybe("Wall time, ISO 8601, UTC.")
    mono: Seconds = _maybe("Monotonic clock, for durations within one run.")
    kind: str = Field(default="", description="Kind of the event, see below.")
    step: Int | None = _maybe("Index of the optimizer step, from 0.")
    lost: Int = _maybe("Number of events before this event that could not be written.")
    # Observations.
    incident: Int = _maybe("Number of the incident; 0 outside of incidents.")
    onset: Int = _maybe("Step of the first alarm.")
    last: Int = _maybe("Step of the last alarm.")
    engine: str = _maybe("Name of the optimizer in the state, if there are several optimizers.")
    cause: Texts = _maybe("Causes of the alarm.")
    alert: Texts = _maybe("Causes of the alarm that begin, if a rule alerts on them.")
    readings: ReadingsRecord = _maybe("The judged numbers, with the last finite loss and norm.")
    evidence: list[EvidenceRecord] = _maybe("Tensors with unusual gradients, the worst first.")
    batches: Batches = _maybe("Batches of the step, or the skipped batches.")
    rows: Rows = _maybe("For each of `batches` its first 64 rows of the dataset, if known.")
    # Responses.
    action: Texts = _maybe("Actions on the host.")
    ordered: Texts = _maybe("Order of the policy that a hook has overridden.")
    observed: bool = _maybe("true: the policy only observes and does nothing.")
    skip: bool = _maybe("The update of the step was skipped.")
    skips: Int = _maybe("Skipped steps of the run up to this step.")
    grad_scale: Number = _maybe("Factor on the step's gradients; absent for a limit per tensor.")
    lr_scale_before: Number = _maybe("Learning-rate multiplier before a cut or a rollback.")
    lr_scale: Number = _maybe("Learning-rate multiplier of the step, or after the rollback.")
    lr: Number = _maybe("The schedule's learning rate at `step`, without the multiplier.")
    lr_limit: Number = _maybe("Upper limit of the learning rate after a cut.")
    lr_at_fault: Number = _maybe("Learning rate at the fault, if the learning rate is the cause.")
    number: Int = _maybe("Number of the rollback in the whole run.")
    checkpoint: Int = _maybe(
        "Step of the restored checkpoint, of the checkpoint that the event reports, or of the "
        "earlier weights of an assessment."
    )
    other_copy: bool = _maybe("true: another copy of the damaged checkpoint was intact.")
    steps_repeated: Int = _maybe("Undone steps that the run repeats after the rollback.")
    steps_lost: Int = _maybe(
        "Undone steps that the run does not repeat, because the data was not rewound: of the "
        "rollback or, at the end, of the whole run."
    )
    held: Texts = _maybe("What the rollback holds in its healthy range, one sentence each.")
    outcome: str = _maybe("What became of the data at a rollback: rewound, or why not.")
    why: str = _maybe("The reason, as text.")
    problem: str = _maybe("What went wrong, as text; of a rollback why steps are not repeated.")
    verdict: Literal["damage", "worse", "recovered", "accepted", "unknown"] = _maybe(
        "Whether the model is worse. worse: earlier weights are better, and the run has time to "
        "recover; recovered: the run is as good again, or the mean loss at the end is no "
        "higher than before accepted damage; accepted: the run keeps the damage; unknown: losses "
        "fit both damage and different data, or do not show that the current weights are worse."
    )
    by: Literal[
        "rule",
        "hook",
        "weights",
        "state",
        "earlier_weights",
        "nonfinite_steps",
        "intended_numbers",
        "nothing",
    ] = _maybe("Basis of the verdict, or of the rollback.")
    loss_before: Number = _maybe(
        "Mean loss when the earlier weights of accepted damage were saved."
    )
    sign: str = _maybe("How an exception was recognized: its type, an HTTP status, an errno.")
    answer: str = _maybe("Response to a fault: a value of `do` in the policy.")
    attempt: Int = _maybe("Number of the attempt at a network call.")
    wait_s: Seconds = _maybe("Seconds until the next attempt.")
    size_before: Int = _maybe("Samples in the largest part, before the change.")
    size: Int = _maybe("Samples in the largest part, after the change.")
    hook: str = _maybe("Name of the hook.")
    seconds: Seconds = _maybe("Duration, or the duration so far of a hang.")
    stacks: Objects = _maybe("Python stacks of rank 0 of a hanging run.")
    diagnosis: str = _maybe("Explanation of the problem for the user.")
    severity: Literal["warning", "error"] = _maybe(
        "`warning`: the run can continue; `error`: the run is lost."
    )
    references: Texts = _maybe("Publications about the response to the cause.")
    # The run.
    host: str = _maybe("Host name.")
    pid: Int = _maybe("Process number.")
    boot: str = _maybe("The kernel's id of the boot.")
    born: Int = _maybe("Start of the process, in clock ticks from the boot.")
    environment: dict[str, str] = _maybe("Versions: healcore, Python, system, frameworks.")
    policy: str = _maybe("Name of the policy.")
    fingerprint: str = _maybe("Fingerprint of the policy.")
    policy_toml: str = _maybe("The policy as TOML, with every key.")
    mode: Literal["heal", "observe"] = _maybe("Mode of the policy.")
    framework: Literal["torch", "jax"] = _maybe("Framework of the run.")
    store: str = _maybe("Location of the checkpoints.")
    save_every: Int = _maybe("Steps between saves.")
    settings: dict[str, Any] = _maybe(
        "Settings of the program as far as known: `learning_rate`, `batch_size`, `accumulation`, "
        "`precision`, and settings by the names of the framework or trainer."
    )
    rank: Int = _maybe("Rank of this process in the run.")
    world: Int = _maybe("Number of processes of the run.")
    of_ranks: Objects = _maybe("Observations of each process.")
    ending: Annotated[Ending, Field(strict=False)] = _maybe("How the process ended.")
    resumes: bool = _maybe("The run continues from checkpoints of an earlier process.")
    incidents: Int = _maybe("Incidents so far.")
    rollbacks: Int = _maybe("Rollbacks so far.")
    last_good: Int = _maybe("Step of the newest known-good checkpoint.")


def validate(event: Mapping[str, Any]) -> tuple[EventRecord, list[str]]:
    """Makes a record of an event, and drops the fields of the wrong type.

    A wrong field must not hide the rest of an event, because the events may be all that is left of
    a run. So the event is validated a second time, without the fields that failed.

    Args:
        event: an event from `healcore.events.read`.

    Returns:
        The event without its invalid fields, and the names of these fields in the event's order.
    """
    try:
        return EventRecord.model_validate(event), []
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors(include_url=False)}
    right = {name: value for name, value in event.items() if name not in wrong}
    return EventRecord.model_validate(right), [name for name in event if name in wrong]
