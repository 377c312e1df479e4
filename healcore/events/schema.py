"""Defines the kinds of events: when each is written, its required fields, and its sentence."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import counted

if TYPE_CHECKING:  # `healcore.torch.attach` uses the sentences without pydantic
    from healcore.core.decision import Readings
    from healcore.events.models import EventRecord, ReadingsRecord

SCHEMA = 2
"""Version of the format. Changed or removed fields need a new version, added fields do not."""
ENVELOPE = ("schema", "seq", "run", "time", "mono", "kind", "step")
"""Fields that every event has."""


# -- sentences ------------------------------------------------------------------------------------


def flag_names(flags: Sequence[str]) -> str:
    """Names of causes or actions as text: "grad spike and loss spike"."""
    return " and ".join(name.lower().replace("_", " ") for name in flags)


def readings_text(readings: Readings | ReadingsRecord, causes: Sequence[str]) -> str:
    """Loss and gradient norm of a step as a clause, without values that were never measured."""
    found = []
    if readings.loss and not math.isnan(readings.loss):  # 0 if the loop passes no loss
        last = "last finite " if "NONFINITE_LOSS" in causes else ""
        found.append(f"{last}loss {readings.loss:.4g}")
    if not math.isnan(readings.grad_norm):
        last = "last finite " if "NONFINITE_GRAD" in causes else ""
        found.append(f"{last}gradient norm {readings.grad_norm:.4g}")
    return ", ".join(found)


class _Words:
    """The fields of an event as words, for a template."""

    def __init__(self, event: EventRecord) -> None:
        self._event = event

    def __getitem__(self, name: str) -> Any:
        value = getattr(self._event, name)
        return flag_names(value) if isinstance(value, list) else "?" if value is None else value


def _start(event: EventRecord) -> str:
    observed = " (observes, changes nothing)" if event.mode == "observe" else ""
    framework = event.framework or ""
    return f"run {event.run} begins: {framework}, policy {event.policy}{observed}"


def alarm_text(alarm: Any) -> str:
    """The sentence of an alarm: an event, or an object with its fields."""
    causes, actions = alarm.cause or (), alarm.action or ()
    rate = "" if alarm.lr is None else f"learning rate {alarm.lr:.4g}"
    seen = alarm.readings and readings_text(alarm.readings, causes)
    orders = [name for name in ("ROLLBACK", "STOP", "CUT_LR") if name in actions]
    done = []
    if alarm.observed:
        done = [f"{' and '.join(orders)} ordered"] if orders else []
        done.append("nothing is changed, the policy observes")
    elif alarm.skip:
        done = [f"skipped, {alarm.skips} of the run" if (alarm.skips or 0) > 1 else "skipped"]
    elif alarm.grad_scale is not None and alarm.grad_scale < 1:
        done = [f"gradients × {alarm.grad_scale:.3g}"]
    elif alarm.grad_scale is not None and not orders:
        done = ["nothing is changed"]
    if "CUT_LR" in orders and alarm.lr_scale is not None and not alarm.observed:
        done.append(f"learning rate × {alarm.lr_scale:g}")
    numbers = ", ".join(filter(None, (seen, rate)))
    return "; ".join(filter(None, (flag_names(causes), numbers, *done)))


def batch_names(batches: Sequence[Sequence[int]], rows: Sequence[list[int]]) -> list[str]:
    """Batches in words, with their first rows of the dataset where these are known."""
    shown = [f" (rows {', '.join(map(str, each[:16]))})" for each in rows]
    return [
        f"epoch {epoch} batch {index}{text}"
        for (epoch, index), text in zip_longest(batches, shown[: len(batches)], fillvalue="")
    ]


def _alarm(event: EventRecord) -> str:
    names = batch_names(event.batches or (), event.rows or ()) if event.rows else ()
    return "; ".join([alarm_text(event), *names])


def _over(event: EventRecord) -> str:
    numbers = event.readings and readings_text(event.readings, ())
    cause, first, last = flag_names(event.cause or ()), event.onset, event.last
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"incident {event.incident} is over: {cause}, {steps}; {numbers or 'no loss'} now"


def _order(event: EventRecord) -> str:
    would = "would order" if event.observed else "ordered"
    actions = ", ".join(flag_names([action]) for action in event.action or ())
    return f"{would}: {actions}" + (f" ({flag_names(event.cause)})" if event.cause else "")


def _rollback(event: EventRecord) -> str:
    number = len(event.batches or ())
    parts = (
        f"from step {event.step or 0} back to the checkpoint of step {event.checkpoint}",
        lr_text(event),
        f"{counted(number, 'batch', 'batches')} skipped" if number else "",
        *(event.held or ()),
        "moments reset" if event.moments_reset else "",
        repeat_text(event),
    )
    return ", ".join(filter(None, parts))


def repeat_text(rollback: EventRecord) -> str:
    """How many of the undone steps are repeated, as a clause, or an empty string if unknown."""
    repeated, lost = rollback.steps_repeated or 0, rollback.steps_lost or 0
    because = f", because {rollback.why}" if rollback.why else ""
    parts = (
        f"{counted(repeated, 'step is', 'steps are')} repeated" if repeated else "",
        f"{counted(lost, 'step is', 'steps are')} not repeated{because}" if lost else "",
    )
    return ", ".join(filter(None, parts))


def lr_text(rollback: EventRecord) -> str:
    """The lowered learning rate of a rollback, as a clause, or an empty string."""
    limit, at_fault, schedule = rollback.lr_limit, rollback.lr_at_fault, rollback.lr
    before = schedule if at_fault is None else at_fault
    scale = 1.0 if rollback.lr_scale is None else rollback.lr_scale
    if not (scale < 1 if before is None or limit is None else limit < before):
        return ""
    if limit is None:
        return f"learning rate × {scale:.3g}"
    text = f"learning rate at most {limit:.3g}"
    if at_fault is not None:
        return f"{text} (it was {at_fault:.3g})"
    return text if schedule is None else f"{text} (the schedule's rate was {schedule:.3g})"


def _lr(event: EventRecord) -> str:
    before, after = event.lr_scale_before, event.lr_scale
    if not before or not after:
        return "learning rate"
    would = "would be " if event.observed else ""
    why = f": {event.why}" if event.why else ""
    return f"learning rate {would}× {after:.3g}, was × {before:.3g}{why}"


_ASSESSMENTS = {
    ("unknown", "nothing"): "declined: no evidence that the current weights are worse",
    ("unknown", "budget"): "declined: the budget of rollbacks is exhausted",
    ("damage", "weights"): "evidence of damage: the weights are not finite",
    ("damage", "state"): "evidence of damage: the state is not finite",
    ("damage", "earlier_weights"): "evidence of damage: earlier weights are better",
    ("worse", "earlier_weights"): "earlier weights are better; the run has time to recover",
    ("recovered", "earlier_weights"): "the run has recovered",
}
"""(`verdict`, `by`) of an event `assessment` -> sentence."""


def _assessment(event: EventRecord) -> str:
    found = f"assessment: {event.verdict or 'unknown'}"
    text = _ASSESSMENTS.get((event.verdict or "", event.by or ""), found)
    since = (
        "" if event.onset is None or event.verdict == "unknown" else f", since step {event.onset}"
    )
    return text + since


def _hook(event: EventRecord) -> str:
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    then = flag_names(event.action or ()) or "nothing"
    return f"the hook {event.hook or ''} changed {flag_names(event.ordered or ())} to {then}"


def _fault(event: EventRecord) -> str:
    severity = f" ({event.severity})" if event.severity else ""
    done = f"; {event.answer.replace('_', ' ')}" if event.answer else ""
    return f"fault: {flag_names(event.cause or ()) or 'unknown'}{severity}: {event.problem}{done}"


# -- kinds ----------------------------------------------------------------------------------------


class Trait(enum.Flag):
    """Properties of a kind of event."""

    JUDGED = enum.auto()
    """`step` is the step that was judged; without this trait the number of steps done."""
    CHECKPOINT = enum.auto()  # `step` is the step of an older checkpoint
    DURABLE = enum.auto()
    """The log waits for the disk. A power cut loses other lines, on Linux about 30 s of them."""
    SEVERE = enum.auto()  # trackers alert on the event


class EventKind(NamedTuple):
    """One kind of event."""

    when: str  # when the event is written
    required: tuple[str, ...] = ()  # required fields, in addition to `ENVELOPE`
    sentence: str | Callable[[EventRecord], str] = ""
    """Template or function of the sentence about an event; empty for a kind without sentences."""
    traits: Trait = Trait(0)


KINDS: dict[str, EventKind] = {
    "start": EventKind(
        "A process begins. The log adds its process number, host and versions.",
        ("host", "pid", "environment", "policy"),
        _start,
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
        "of two, and at a loss twice as high as in any line before.",
        ("cause", "action", "severity", "diagnosis", "references"),
        "{severity}: {cause}: {diagnosis}",
        Trait.JUDGED | Trait.SEVERE,
    ),
    "order": EventKind(
        "The policy orders an action on the host.", ("action", "cause"), _order, Trait.JUDGED
    ),
    "assessment": EventKind(
        "The check for evidence that the model is worse. Only the verdict `damage` rolls back.",
        ("verdict", "cause"),
        _assessment,
        Trait.JUDGED,
    ),
    "save": EventKind("A checkpoint's copy was taken."),
    "save_failed": EventKind(
        "A checkpoint could not be written; training continues.",
        ("problem",),
        "a checkpoint was not written: {problem}",
        Trait.CHECKPOINT | Trait.SEVERE,
    ),
    "good": EventKind("A checkpoint is known-good from now on.", traits=Trait.CHECKPOINT),
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
        _rollback,
        Trait.DURABLE | Trait.SEVERE,
    ),
    "skipped_batches": EventKind("The run skips exactly these batches.", ("batches",)),
    "data": EventKind(
        "The data was positioned after a restart or a rollback, or a loader is read first.",
        ("outcome",),
    ),
    "lr": EventKind(
        "The learning-rate multiplier was cut (`action`: `CUT_LR`), left 1, or returned to 1.",
        ("lr_scale_before", "lr_scale"),
        _lr,
        Trait.JUDGED,
    ),
    "hook": EventKind("A hook overrode an order, or raised.", (), _hook, Trait.JUDGED),
    "fault": EventKind(
        "An exception was classified, or a step does not return. `answer` is the action; without "
        "`answer` the exception propagates.",
        ("cause", "problem"),
        _fault,
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
    """Whether a kind of event has a trait; False for a kind of a newer healcore."""
    return kind in KINDS and trait in KINDS[kind].traits


def sentence(event: EventRecord) -> str:
    """The sentence of an event, or an empty string if its kind has none."""
    write = KINDS[event.kind].sentence if event.kind in KINDS else ""
    return write.format_map(_Words(event)) if isinstance(write, str) else write(event)
