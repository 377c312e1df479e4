"""The kinds of events: when each is written, its required fields, and its sentence."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import counted, first_of
from healcore.core.array_namespace import SIGNAL_LIMIT

if TYPE_CHECKING:  # `healcore.torch.attach` uses the sentences without pydantic
    from healcore.core.step_record import Readings
    from healcore.events.models import EventRecord, ReadingsRecord

SCHEMA = 2
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

    At a step whose loss is NaN, the readings have the last finite loss, and the clause says so.

    Args:
        readings: the judged numbers. Their norm is NaN, and their loss is NaN or 0, if it was
            never measured.
        causes: names of the causes of the step.

    Returns:
        The clause, for example "loss 2.31, last finite gradient norm 0.8", without values that were
        never measured; empty if neither was.
    """
    clauses = []
    for name, value, cause in (
        ("loss", readings.loss or math.nan, "NONFINITE_LOSS"),  # 0 if the loop passes no loss
        ("gradient norm", readings.grad_norm, "NONFINITE_GRAD"),
    ):
        if math.isnan(value):
            continue
        text = f"{name} {value:.4g}"
        if abs(value) >= 0.999 * SIGNAL_LIMIT:  # the limit is rounded to float32
            text = f"{name} {'below -' if value < 0 else 'above '}1e15"
        if cause in causes:
            text = f"last finite {text}"
        clauses.append(text)
    return ", ".join(clauses)


def batch_names(batches: Sequence[Sequence[int]], rows: Sequence[list[int]]) -> list[str]:
    """Names batches, with their rows of the dataset where these are known.

    Args:
        batches: the (epoch, index) of each batch.
        rows: for each of `batches` its first rows of the dataset; may be shorter, or empty.

    Returns:
        A text for each batch, for example "epoch 0 batch 412 (rows 7, 19)".
    """
    names = []
    for place, (epoch, index) in enumerate(batches):
        name = f"epoch {epoch} batch {index}"
        if place < len(rows):
            name += f" (rows {rows_text(rows[place])})"
        names.append(name)
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
    limit, at_fault, scheduled = rollback.lr_limit, rollback.lr_at_fault, rollback.lr
    if limit is None:
        if rollback.lr_scale is None or rollback.lr_scale >= 1:
            return ""
        return f"learning rate × {rollback.lr_scale:.3g}"
    text = f"learning rate at most {limit:.3g}"
    if at_fault is not None:
        text += f" (it was {at_fault:.3g})"
    elif scheduled is not None:
        text += f" (the schedule's rate was {scheduled:.3g})"
    before = scheduled if at_fault is None else at_fault
    return "" if before is not None and limit >= before else text


def _word(event: EventRecord, name: str) -> str:
    """A field of an event as it stands in a sentence, or an empty string if it is absent."""
    if name == "rate":
        return lr_text(event)
    value = getattr(event, name)
    if value is None:
        return ""
    match name:
        case "batches":
            return counted(len(value), "batch", "batches") if value else ""
        case "steps_repeated" | "steps_lost":
            return counted(value, "step is", "steps are")
        case "seconds":
            return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.1f} ms"
        case "held":
            return ", ".join(value)
        case "moments_reset":
            return "moments reset" if value else ""
    if isinstance(value, list):
        return flags_text(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _filled(template: str, event: EventRecord) -> str:
    """Fills a template: `{field}` is the field, and [a part] is left out without its fields."""

    def part(found: re.Match[str]) -> str:
        names = re.findall(r"{(\w+)}", found[1])
        return found[1] if all(_word(event, name) for name in names) else ""

    template = re.sub(r"\[(.*?)\]", part, template)
    return re.sub(r"{(\w+)}", lambda found: _word(event, found[1]) or "?", template)


# -- sentences that no template can say -----------------------------------------------------------


def alarm_text(alarm: Any) -> str:
    """Describes an alarm: its causes, what was measured, and what was done about it.

    Args:
        alarm: an event `alarm`, or an object with its fields `cause`, `readings`, `lr`,
            `observed`, `skip`, `skips`, `grad_scale`, `action` and `lr_scale`.
            `healcore.torch.attach` has no events, and passes such an object.

    Returns:
        The sentence, for example "grad spike; loss 2.31, gradient norm 41; clipped as usual
        (gradients × 0.024)".
    """
    causes, orders = alarm.cause or (), {*(alarm.action or ())} & {"ROLLBACK", "STOP", "CUT_LR"}
    numbers = [readings_text(alarm.readings, causes)] if alarm.readings else []
    if alarm.lr is not None and not alarm.observed and (alarm.lr_scale or 1) != 1:
        rate = alarm.lr * alarm.lr_scale
        numbers.append(f"learning rate {rate:.4g} (the schedule's rate was {alarm.lr:.4g})")
    elif alarm.lr is not None:
        numbers.append(f"learning rate {alarm.lr:.4g}")
    parts = [flags_text(causes), ", ".join(filter(None, numbers))]
    if alarm.observed:
        parts.append("nothing is changed, the policy observes")
    elif alarm.skip:
        parts.append("skipped" + (f" ({alarm.skips:,} so far)" if (alarm.skips or 0) > 1 else ""))
    elif alarm.grad_scale is not None and alarm.grad_scale < 1:
        parts.append(f"clipped as usual (gradients × {alarm.grad_scale:.3g})")
    elif alarm.grad_scale is not None and not orders:
        parts.append("nothing is changed")
    if "CUT_LR" in orders and alarm.lr_scale is not None and not alarm.observed:
        parts.append(f"learning rate × {alarm.lr_scale:g}")
    return "; ".join(filter(None, parts))


def _alarm(event: EventRecord) -> str:
    text = alarm_text(event)
    if event.batches and (event.rows or event.skip):
        text += "; " + first_of(batch_names(event.batches, event.rows or ()), 3, "; ")
    return text


def _over(event: EventRecord) -> str:
    steps = f"steps {event.onset} to {event.last}"
    if event.onset == event.last:
        steps = f"step {event.onset}"
    now = readings_text(event.readings, ()) if event.readings else ""
    return _filled(
        f"incident {{incident}} is over: {{cause}}, {steps}; {now or 'no loss'} now", event
    )


_ASSESSMENTS = {
    ("unknown", "nothing"): "declined: no evidence that the current weights are worse",
    ("unknown", "budget"): "declined: the budget of rollbacks is exhausted",
    ("damage", "weights"): "the weights are not finite, since step {onset}",
    ("damage", "state"): "the state is not finite, since step {onset}",
    ("damage", "earlier_weights"): "{weights} are better on the same batches, since step {onset}",
    ("worse", "earlier_weights"): "{weights} are better on the same batches, since step {onset}; "
    "the run has time to recover",
    ("recovered", "earlier_weights"): "the run has recovered from the damage of step {onset}[; "
    "{why}]",
    ("accepted", "earlier_weights"): "damage is not repaired: {weights} are better, since step "
    "{onset}[; {why}]",
}
"""(`verdict`, `by`) of an event `assessment` -> template."""
_ACCEPTED = "damage is not repaired, since step {onset}[; {why}]"


def _assessment(event: EventRecord) -> str:
    template = _ASSESSMENTS.get((event.verdict or "", event.by or ""))
    if template is None:
        template = _ACCEPTED if event.verdict == "accepted" else "assessment: {verdict}"
    weights = "earlier weights" if event.checkpoint is None else "the weights of step {checkpoint}"
    return _filled(template.replace("{weights}", weights), event)


def _skipped_batches(event: EventRecord) -> str:
    return "skipped: " + ", ".join(batch_names(event.batches or (), event.rows or ()))


def _hook(event: EventRecord) -> str:
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    return _filled("the hook {hook} changed {ordered} to ", event) + (
        flags_text(event.action or ()) or "nothing"
    )


# -- the table ------------------------------------------------------------------------------------


class EventKind(NamedTuple):
    """One kind of event, an entry of `KINDS`.

    Attributes:
        when: when the event is written. docs/events.md and the JSON Schema quote this text.
        required: required fields, in addition to `ENVELOPE`.
        sentence: template (see `_filled`) or function of the sentence about an event.
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
        "run {run} begins: {framework}, policy {policy}[, mode {mode}]",
        Trait.DURABLE,
    ),
    "resume": EventKind(
        "The run continues from a checkpoint of an earlier process.",
        ("checkpoint",),
        "resumed from the checkpoint of step {checkpoint}",
    ),
    "alarm": EventKind("A step with a cause.", ("cause", "readings"), _alarm, Trait.JUDGED),
    "incident": EventKind(
        "An incident begins.",
        ("incident", "onset", "cause"),
        "incident {incident}: {cause}",
        Trait.JUDGED | Trait.DURABLE,
    ),
    "over": EventKind(
        "An incident is over: `incident.quiet_steps` steps had no alarm.",
        ("incident", "onset", "last", "cause", "readings"),
        _over,
        Trait.JUDGED | Trait.SEVERE,
    ),
    "alert": EventKind(
        "A rule alerts on a cause that begins, also while another cause lasts: once in an "
        "incident; outside of incidents at the first ten faults of each cause, then at each power "
        "of two.",
        ("cause", "action", "severity", "diagnosis", "references"),
        "{severity}: {cause}: {diagnosis}",
        Trait.JUDGED | Trait.SEVERE,
    ),
    "order": EventKind(
        "The policy orders an action on the host.",
        ("action", "cause"),
        "ordered: {action}[ ({cause})]",
        Trait.JUDGED,
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
        "A checkpoint's copy was taken.", (), "checkpoint {step} is copied[ in {seconds}][ ({why})]"
    ),
    "save_failed": EventKind(
        "A checkpoint could not be written; training continues.",
        ("problem",),
        "a checkpoint was not written: {problem}",
        Trait.CHECKPOINT | Trait.SEVERE,
    ),
    "good": EventKind(
        "A checkpoint is known-good from now on.",
        (),
        "checkpoint {step} is known-good",
        Trait.CHECKPOINT,
    ),
    "damaged": EventKind(
        "The bytes of a checkpoint have changed since the save.",
        ("problem",),
        "a checkpoint is damaged: {problem}",
        Trait.CHECKPOINT | Trait.SEVERE,
    ),
    "rollback": EventKind(
        "A rollback is done. `step` is the number of steps done when it began, up to one step "
        "after the last judged step.",
        ("checkpoint", "outcome"),
        "rolled back from step {step} to the checkpoint of step {checkpoint}[, {rate}][, {batches} "
        "skipped][, {held}][, {moments_reset}][, {steps_repeated} repeated]"
        "[, {steps_lost} not repeated, because {why}]",
        Trait.DURABLE | Trait.SEVERE,
    ),
    "skipped_batches": EventKind(
        "The run skips exactly these batches.", ("batches",), _skipped_batches
    ),
    "data": EventKind(
        "The data was positioned after a restart or a rollback.",
        ("outcome",),
        "data: {outcome}",
    ),
    "lr": EventKind(
        "The learning-rate multiplier was cut (`action`: `CUT_LR`), left 1, or returned to 1.",
        ("lr_scale_before", "lr_scale"),
        "learning rate × {lr_scale}, was × {lr_scale_before}[: {why}]",
        Trait.JUDGED,
    ),
    "hook": EventKind("A hook overrode an order, or raised.", (), _hook, Trait.JUDGED),
    "fault": EventKind(
        "An exception was classified, or a step does not return. `answer` is the action; without "
        "`answer` the exception propagates.",
        ("cause", "problem"),
        "fault: {cause}[ ({severity})]: {problem}[; answer: {answer}]",
        Trait.SEVERE,
    ),
    "vote": EventKind(
        "One of several processes was asked to end, and all of them end the run.",
        ("outcome", "why", "of_ranks"),
        "the ranks agreed: {outcome} ({why})",
    ),
    "retried": EventKind("A network call has succeeded after a failure.", ("attempt",), "{why}"),
    "stop": EventKind(
        "The policy ends the run.",
        ("why", "diagnosis"),
        "stopped: {why}",
        Trait.DURABLE | Trait.SEVERE,
    ),
    "problem": EventKind(
        "A problem; the run continues.", ("problem",), "problem: {problem}", Trait.SEVERE
    ),
    "end": EventKind(
        "The process ends. A killed process does not write this event.",
        ("ending",),
        "end: {ending}",
        Trait.DURABLE,
    ),
}
"""Name of a kind -> the kind."""


def has(kind: str, trait: Trait) -> bool:
    """Whether a kind of event has a trait.

    Args:
        kind: name of the kind, as in the field `kind`.
        trait: the trait, or several traits of which the kind must have each.

    Returns:
        False for a kind of a newer healcore.
    """
    return kind in KINDS and trait in KINDS[kind].traits


def sentence(event: EventRecord) -> str:
    """Writes the sentence about an event, as consoles, trackers and reports show it.

    Args:
        event: the event, from `models.validate`.

    Returns:
        The sentence, without the step and the time, or an empty string for a kind of a newer
        healcore.
    """
    if event.kind not in KINDS:
        return ""
    template = KINDS[event.kind].sentence
    text = template(event) if callable(template) else _filled(template, event)
    if event.observed and event.kind in ("order", "lr"):
        text += "; nothing is changed, the policy observes"
    return text
