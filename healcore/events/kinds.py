"""The kinds of events: when each is written, its required fields, and its sentence."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import counted, first_of

if TYPE_CHECKING:  # `healcore.torch.attach` uses the sentences without pydantic
    from healcore.core.step_record import Readings
    from healcore.events.models import EventRecord, ReadingsRecord

SCHEMA = 3
"""Version of the format. Changed or removed fields need a new version, added fields do not."""
ENVELOPE = ("schema", "seq", "run", "time", "mono", "kind", "step")
"""Fields that every event has."""
MAX_ROWS = 64
"""Limit of the rows of a batch in an event."""
_SHOWN_ROWS = 4
"""Limit of the rows of a batch in a sentence."""


class Trait(enum.Flag):
    """Properties of a kind of event, which the log, the readers and the trackers ask for."""

    JUDGED = enum.auto()
    """`step` is the step that was judged. Without this trait, `step` is the number of steps
    done."""
    CHECKPOINT = enum.auto()
    """`step` is the step of an older checkpoint."""
    DURABLE = enum.auto()
    """The log waits for the disk. A power cut loses other lines, on Linux about 30 s of them."""
    SEVERE = enum.auto()
    """Trackers alert on the event."""


# -- words ----------------------------------------------------------------------------------------


def flags_text(flags: Sequence[str]) -> str:
    """Names of causes or actions as text: "grad spike and loss spike"."""
    return " and ".join(name.lower().replace("_", " ") for name in flags)


def readings_text(readings: Readings | ReadingsRecord, causes: Sequence[str]) -> str:
    """Describes the loss and the gradient norm of a step as a clause.

    At a step that is not finite, the readings have the last finite values, and the clause says so.

    Args:
        readings: the judged numbers, NaN if they were never measured.
        causes: names of the causes of the step.

    Returns:
        The clause, for example "last finite loss 2.31, gradient norm 0.8", without values that were
        never measured; empty if neither was.
    """
    # The loss is 0 if the loop passes none.
    numbers = (("loss", readings.loss or math.nan), ("gradient norm", readings.grad_norm))
    clause = ", ".join(f"{name} {each:.4g}" for name, each in numbers if not math.isnan(each))
    nonfinite = clause and {"NONFINITE_LOSS", "NONFINITE_GRAD"} & {*causes}
    return f"last finite {clause}" if nonfinite else clause


def batch_names(batches: Sequence[Sequence[int]], rows: Sequence[list[int]]) -> list[str]:
    """Names batches, with their rows of the dataset where these are known.

    Args:
        batches: the (epoch, index) of each batch.
        rows: for each of `batches` its first rows of the dataset; may be shorter, or empty.

    Returns:
        A text for each batch, for example "epoch 0 batch 412 (rows 7, 19)".
    """
    names = [f"epoch {epoch} batch {index}" for epoch, index in batches]
    for place, known in enumerate(rows[: len(names)]):
        names[place] += f" (rows {rows_text(known)})"
    return names


def rows_text(rows: Sequence[int]) -> str:
    """Lists the first rows of a batch, and the number of the others.

    An event has at most 64 rows of a batch, so the text of a larger batch says "and more".
    """
    if len(rows) >= MAX_ROWS:
        return ", ".join(map(str, rows[:_SHOWN_ROWS])) + " and more"
    return first_of([*map(str, rows)], _SHOWN_ROWS)


def lr_text(rollback: EventRecord) -> str:
    """Describes the lowered learning rate of a rollback.

    Args:
        rollback: an event `rollback`.

    Returns:
        A clause, for example "learning rate at most 0.0005 (it was 0.001)", or an empty string if
        the rollback did not lower the learning rate.
    """
    limit, before = rollback.lr_limit, rollback.lr_at_fault
    before = rollback.lr if before is None else before
    if limit is None or (before is not None and limit >= before):
        return ""
    was = "" if before is None else f" (it was {before:.3g})"
    return f"learning rate at most {limit:.3g}{was}"


# -- sentences ------------------------------------------------------------------------------------


def alarm_text(alarm: Any) -> str:
    """Describes an alarm: its causes, what was measured, and what was done about it.

    Args:
        alarm: an event `alarm`, or an object with its fields `cause`, `readings`, `lr`, `why`,
            `observed`, `skip`, `skips`, `grad_scale`, `action` and `lr_scale`.
            `healcore.torch.attach` has no events, and passes such an object.

    Returns:
        The sentence, for example "grad spike; loss 2.31, gradient norm 41; clipped as usual
        (gradients × 0.024)".
    """
    causes, orders = alarm.cause or (), {*(alarm.action or ())} & {"ROLLBACK", "STOP", "CUT_LR"}
    numbers = [readings_text(alarm.readings, causes) if alarm.readings else ""]
    scale = 1 if alarm.observed or alarm.lr_scale is None else alarm.lr_scale
    if scale != 1 or (alarm.lr is not None and not alarm.skip):
        rate = "" if alarm.lr is None else f" {alarm.lr:.4g}"
        numbers.append(f"learning rate{rate}" + (f" × {scale:g}" if scale != 1 else ""))
    parts = [flags_text(causes), ", ".join(filter(None, numbers)), alarm.why]
    if alarm.observed:
        parts.append("only observed")
    elif alarm.skip:
        parts.append("skipped" + (f" ({alarm.skips:,} so far)" if (alarm.skips or 0) > 1 else ""))
    elif (alarm.grad_scale or 1) < 1:
        parts.append(f"clipped as usual (gradients × {alarm.grad_scale:.3g})")
    elif alarm.grad_scale and not orders:
        parts.append("nothing is changed")
    return "; ".join(filter(None, parts))


def _alarm(event: EventRecord) -> str:
    names = batch_names(event.batches or (), event.rows or ())
    which = f"incident {event.incident}: " if event.incident else ""
    parts = [which + alarm_text(event), first_of(names, 3) if event.rows or event.skip else ""]
    return "; ".join(filter(None, parts))


def _over(event: EventRecord) -> str:
    steps = f"steps {event.onset} to {event.last}"
    if event.onset == event.last:
        steps = f"step {event.onset}"
    now = readings_text(event.readings, ()) if event.readings else ""
    causes = flags_text(event.cause or ())
    return f"incident {event.incident} is over: {causes}, {steps}; {now or 'no loss'} now"


def _assessment(event: EventRecord) -> str:
    weights = "earlier weights"
    if event.checkpoint is not None:
        weights = f"the weights of step {event.checkpoint}"
    found = f"{weights} are better on the same batches"
    if event.by in ("weights", "state"):
        found = f"the {event.by} {'are' if event.by == 'weights' else 'is'} not finite"
    match event.verdict:
        case "unknown":
            return "declined: no evidence that the current weights are worse"
        case "recovered":
            found = f"the run has recovered from the damage of step {event.onset}"
        case "accepted":
            found = f"damage is not repaired, since step {event.onset}"
        case _:
            found += f", since step {event.onset}"
    return "; ".join(filter(None, (found, event.why)))


def _rollback(event: EventRecord) -> str:
    changes = [f"rolled back to checkpoint {event.checkpoint}", lr_text(event)]
    if event.batches:
        changes.append(f"{counted(len(event.batches), 'batch', 'batches')} skipped")
    if event.steps_repeated:
        changes.append(f"{counted(event.steps_repeated, 'step is', 'steps are')} repeated")
    if event.steps_lost:
        steps = counted(event.steps_lost, "step is", "steps are")
        changes.append(f"{steps} not repeated, because {event.problem}")
    changes += event.held or ()
    return "; ".join(filter(None, (event.why, ", ".join(filter(None, changes)))))


def _hook(event: EventRecord) -> str:
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    ordered, action = (flags_text(names or ()) for names in (event.ordered, event.action))
    return f"the hook {event.hook} changed {ordered} to {action or 'nothing'}"


def _fault(event: EventRecord) -> str:
    severity = f" ({event.severity})" if event.severity else ""
    answer = f"; answer: {event.answer}" if event.answer else ""
    return f"fault: {flags_text(event.cause or ())}{severity}: {event.problem}{answer}"


# -- the table ------------------------------------------------------------------------------------


class EventKind(NamedTuple):
    """One kind of event, an entry of `KINDS`.

    Attributes:
        when: when the event is written. docs/events.md and the JSON Schema quote this text.
        required: required fields, in addition to `ENVELOPE`.
        sentence: what consoles, trackers and reports say: a template with the event as `e`, or a
            function.
        traits: properties of the kind.
    """

    when: str
    required: tuple[str, ...]
    sentence: str | Callable[[EventRecord], str]
    traits: Trait = Trait(0)


KINDS: dict[str, EventKind] = {
    "start": EventKind(
        "A process begins. The log adds its process number, host and versions.",
        ("host", "pid", "environment", "policy"),
        "run {e.run} begins: {e.framework}, policy {e.policy}, mode {e.mode}",
        Trait.DURABLE,
    ),
    "resume": EventKind(
        "The run continues from a checkpoint of an earlier process.",
        ("checkpoint",),
        "resumed from the checkpoint of step {e.checkpoint}",
    ),
    "alarm": EventKind(
        "A step with a cause. `incident` is the number of its incident, `action` what the policy "
        "orders. Where a rule alerts on a cause that begins, `alert` names the cause, and "
        "`severity`, `diagnosis` and `references` explain it: at the first ten faults of each "
        "cause, then at each power of two.",
        ("cause", "readings"),
        _alarm,
        Trait.JUDGED,
    ),
    "over": EventKind(
        "An incident is over: `incident.quiet_steps` steps had no alarm.",
        ("incident", "onset", "last", "cause", "readings"),
        _over,
        Trait.JUDGED | Trait.SEVERE,
    ),
    "assessment": EventKind(
        "The check for evidence that the model is worse. The verdict `damage` rolls back. The "
        "verdict `accepted` keeps damage that has come back after each rollback, or for which no "
        "checkpoint could be restored: a last rollback only undoes what was tried.",
        ("verdict", "cause"),
        _assessment,
        Trait.JUDGED,
    ),
    "save": EventKind(
        "A checkpoint's copy was taken.", (), "checkpoint {e.step} is copied ({e.why})"
    ),
    "save_failed": EventKind(
        "A checkpoint could not be written; training continues.",
        ("problem",),
        "a checkpoint was not written: {e.problem}",
        Trait.CHECKPOINT | Trait.SEVERE,
    ),
    "good": EventKind(
        "A checkpoint is known-good from now on.",
        (),
        "checkpoint {e.step} is known-good",
        Trait.CHECKPOINT,
    ),
    "damaged": EventKind(
        "The bytes of a checkpoint have changed since the save.",
        ("problem",),
        "a checkpoint is damaged: {e.problem}",
        Trait.CHECKPOINT | Trait.SEVERE,
    ),
    "rollback": EventKind(
        "A rollback is done. `step` is the number of steps done when it began, up to one step "
        "after the last judged step. `why` is its reason, `outcome` what became of the data.",
        ("checkpoint", "outcome"),
        _rollback,
        Trait.DURABLE | Trait.SEVERE,
    ),
    "hook": EventKind("A hook overrode an order, or raised.", (), _hook, Trait.JUDGED),
    "fault": EventKind(
        "An exception was classified, or a step does not return. `answer` is the action; without "
        "`answer` the exception propagates.",
        ("cause", "problem"),
        _fault,
        Trait.SEVERE,
    ),
    "note": EventKind(
        "The run has done something that a reader may look for: skipped batches, repeated a call, "
        "noticed a changed model, ended all processes together.",
        ("why",),
        "{e.why}",
    ),
    "stop": EventKind(
        "The policy ends the run.",
        ("why", "diagnosis"),
        "stopped: {e.why}",
        Trait.DURABLE | Trait.SEVERE,
    ),
    "problem": EventKind(
        "A problem; the run continues.", ("problem",), "{e.problem}", Trait.SEVERE
    ),
    "end": EventKind(
        "The process ends. A killed process does not write this event.",
        ("ending",),
        "end: {e.ending}",
        Trait.DURABLE,
    ),
}
"""Name of a kind -> the kind."""


def has(kind: str, trait: Trait) -> bool:
    """Whether a kind of event has a trait; False for a kind of a newer healcore."""
    return kind in KINDS and trait in KINDS[kind].traits


def sentence(event: EventRecord) -> str:
    """Writes the sentence about an event.

    Args:
        event: the event, from `models.validate`.

    Returns:
        The sentence, without the step and the time, or an empty string for a kind of a newer
        healcore.
    """
    if event.kind not in KINDS:
        return ""
    text = KINDS[event.kind].sentence
    return text.format(e=event) if isinstance(text, str) else text(event)
