"""The kinds of events: when each is written, its required fields, and its sentence."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from healcore.events.sentences import (
    EventWords,
    alarm_sentence,
    assessment_sentence,
    data_sentence,
    fault_sentence,
    good_sentence,
    hook_sentence,
    lr_sentence,
    order_sentence,
    over_sentence,
    rollback_sentence,
    save_sentence,
    skipped_batches_sentence,
    start_sentence,
)

if TYPE_CHECKING:  # `healcore.torch.attach` uses the sentences without pydantic
    from healcore.events.models import EventRecord

SCHEMA = 2
"""Version of the format. Changed or removed fields need a new version, added fields do not."""
ENVELOPE = ("schema", "seq", "run", "time", "mono", "kind", "step")
"""Fields that every event has."""


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


class EventKind(NamedTuple):
    """One kind of event, an entry of `KINDS`.

    Attributes:
        when: when the event is written. docs/events.md and the JSON Schema quote this text.
        required: required fields, in addition to `ENVELOPE`.
        sentence: template or function of the sentence about an event. A template has the names of
            fields in braces. Empty for a kind without sentences.
        traits: properties of the kind.
    """

    when: str
    required: tuple[str, ...] = ()
    sentence: str | Callable[[EventRecord], str] = ""
    traits: Trait = Trait(0)


KINDS: dict[str, EventKind] = {
    "start": EventKind(
        "A process begins. The log adds its process number, host and versions.",
        ("host", "pid", "environment", "policy"),
        start_sentence,
        Trait.DURABLE,
    ),
    "resume": EventKind(
        "The run continues from a checkpoint of an earlier process.",
        ("checkpoint",),
        "resumed from the checkpoint of step {checkpoint}",
    ),
    "alarm": EventKind("A step with a cause.", ("cause", "readings"), alarm_sentence, Trait.JUDGED),
    "incident": EventKind(
        "An incident begins.",
        ("incident", "onset", "cause"),
        "incident {incident}: {cause}",
        Trait.JUDGED | Trait.DURABLE,
    ),
    "over": EventKind(
        "An incident is over: `incident.quiet_steps` steps had no alarm.",
        ("incident", "onset", "last", "cause", "readings"),
        over_sentence,
        Trait.JUDGED | Trait.SEVERE,
    ),
    "alert": EventKind(
        "A rule alerts on a cause that begins, also while another cause lasts: once in an "
        "incident; outside of incidents at the first ten faults of each cause, then at each power "
        "of two, and at a loss twice as high as in any line before.",
        ("cause", "action", "severity", "diagnosis", "references"),
        "{severity}: {cause}: {diagnosis}",
        Trait.JUDGED | Trait.SEVERE,
    ),
    "order": EventKind(
        "The policy orders an action on the host.",
        ("action", "cause"),
        order_sentence,
        Trait.JUDGED,
    ),
    "assessment": EventKind(
        "The check for evidence that the model is worse. The verdict `damage` rolls back. The "
        "verdict `accepted` keeps damage that has come back after each rollback, or for which no "
        "checkpoint could be restored: a last rollback only undoes what was tried.",
        ("verdict", "cause"),
        assessment_sentence,
        Trait.JUDGED,
    ),
    "save": EventKind("A checkpoint's copy was taken.", (), save_sentence),
    "save_failed": EventKind(
        "A checkpoint could not be written; training continues.",
        ("problem",),
        "a checkpoint was not written: {problem}",
        Trait.CHECKPOINT | Trait.SEVERE,
    ),
    "good": EventKind(
        "A checkpoint is known-good from now on.", (), good_sentence, Trait.CHECKPOINT
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
        rollback_sentence,
        Trait.DURABLE | Trait.SEVERE,
    ),
    "skipped_batches": EventKind(
        "The run skips exactly these batches.", ("batches",), skipped_batches_sentence
    ),
    "data": EventKind(
        "The data was positioned after a restart or a rollback.",
        ("outcome",),
        data_sentence,
    ),
    "lr": EventKind(
        "The learning-rate multiplier was cut (`action`: `CUT_LR`), left 1, or returned to 1.",
        ("lr_scale_before", "lr_scale"),
        lr_sentence,
        Trait.JUDGED,
    ),
    "hook": EventKind("A hook overrode an order, or raised.", (), hook_sentence, Trait.JUDGED),
    "fault": EventKind(
        "An exception was classified, or a step does not return. `answer` is the action; without "
        "`answer` the exception propagates.",
        ("cause", "problem"),
        fault_sentence,
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
        "A problem; the run continues.",
        ("problem",),
        "problem: {problem}",
        Trait.SEVERE,
    ),
    "end": EventKind(
        "The process ends. A killed process does not write this event.",
        ("ending",),
        "end: {ending}",
        Trait.DURABLE,
    ),
}


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
        The sentence, without the step and the time, or an empty string if the kind has no sentence.
    """
    if event.kind not in KINDS:  # a newer healcore has written the event
        return ""
    template = KINDS[event.kind].sentence
    if isinstance(template, str):
        return template.format_map(EventWords(event))
    return template(event)
