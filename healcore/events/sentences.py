"""The sentences about events, for consoles, trackers and reports (`KINDS` in `schema.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.console import counted, first_of
from healcore.core.array_namespace import SIGNAL_LIMIT

if TYPE_CHECKING:  # `healcore.torch.attach` uses the sentences without pydantic
    from healcore.core.step_record import Readings
    from healcore.events.models import EventRecord, ReadingsRecord


MAX_ROWS = 64
"""Limit of the rows of a batch in an event."""
_SHOWN_ROWS = 16
"""Limit of the rows of a batch in a sentence."""
_FEW_ROWS = 4
"""The limit in the sentence of an alarm that changes nothing."""
_SHOWN_BATCHES = 3
"""Limit of the batches in the sentence of a step that reads many batches."""


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
    if readings.loss and not math.isnan(readings.loss):  # 0 if the loop passes no loss
        name = "loss"
        if "NONFINITE_LOSS" in causes:
            name = "last finite loss"
        clauses.append(f"{name} {_reading(readings.loss)}")
    if not math.isnan(readings.grad_norm):
        name = "gradient norm"
        if "NONFINITE_GRAD" in causes:
            name = "last finite gradient norm"
        clauses.append(f"{name} {_reading(readings.grad_norm)}")
    return ", ".join(clauses)


def _reading(value: float) -> str:
    """Writes a judged number, for example "2.31", or "above 1e15" at the limit of the detectors."""
    if abs(value) < 0.999 * SIGNAL_LIMIT:  # the limit is rounded to float32
        return f"{value:.4g}"
    if value < 0:
        return "below -1e15"
    return "above 1e15"


class EventWords:
    """The fields of an event as words, for a template."""

    def __init__(self, event: EventRecord) -> None:
        self._event = event

    def __getitem__(self, name: str) -> Any:
        value = getattr(self._event, name)
        if isinstance(value, list):
            return flags_text(value)
        if value is None:
            return "?"
        return value


def _join(parts: Iterable[str], separator: str = ", ") -> str:
    """Joins the parts of a sentence that are not empty."""
    return separator.join(part for part in parts if part)


def start_sentence(event: EventRecord) -> str:
    """The sentence of an event `start`."""
    text = f"run {event.run} begins: {event.framework or ''}, policy {event.policy}"
    if event.mode == "observe":
        text += " (observes, changes nothing)"
    return text


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
    return _alarm_without_batches(alarm, _responses(alarm))


def _alarm_without_batches(alarm: Any, responses: _Responses) -> str:
    """The sentence of `alarm_text`, which has no batches."""
    causes = alarm.cause or ()
    numbers = []
    if alarm.readings:
        numbers.append(readings_text(alarm.readings, causes))
    if alarm.lr is not None:
        numbers.append(_alarm_rate(alarm))
    return _join([flags_text(causes), _join(numbers), *responses.clauses], "; ")


def _alarm_rate(alarm: Any) -> str:
    """Describes the rate of a step: in force, and the schedule's."""
    if alarm.observed or alarm.lr_scale is None or alarm.lr_scale == 1:
        return f"learning rate {alarm.lr:.4g}"
    in_force = alarm.lr * alarm.lr_scale
    return f"learning rate {in_force:.4g} (the schedule's rate was {alarm.lr:.4g})"


class _Responses(NamedTuple):
    """What was done about an alarm, or would be done if the policy only observes."""

    clauses: list[str]
    """The clauses of the sentence; empty if the alarm does not say."""
    changes_nothing: bool
    """Whether a clause says that nothing is changed."""


def _responses(alarm: Any) -> _Responses:
    """Finds out what was done about an alarm."""
    actions = alarm.action or ()
    orders = [name for name in ("ROLLBACK", "STOP", "CUT_LR") if name in actions]
    responses = []
    changes_nothing = False
    if alarm.observed:
        if orders:
            responses.append(f"{' and '.join(orders)} ordered")
        responses.append("nothing is changed, the policy observes")
        return _Responses(responses, changes_nothing=True)
    if alarm.skip:
        if alarm.skips is not None and alarm.skips > 1:
            responses.append(f"skipped ({alarm.skips:,} so far)")
        else:
            responses.append("skipped")
    elif alarm.grad_scale is not None and alarm.grad_scale < 1:
        responses.append(f"clipped as usual (gradients × {alarm.grad_scale:.3g})")
    elif alarm.grad_scale is not None and not orders:
        responses.append("nothing is changed")
        changes_nothing = True
    if "CUT_LR" in orders and alarm.lr_scale is not None:
        responses.append(f"learning rate × {alarm.lr_scale:g}")
    return _Responses(responses, changes_nothing)


def batch_names(
    batches: Sequence[Sequence[int]], rows: Sequence[list[int]], limit: int = _SHOWN_ROWS
) -> list[str]:
    """Names batches, with their rows of the dataset where these are known.

    Args:
        batches: the (epoch, index) of each batch.
        rows: for each of `batches` its first rows of the dataset; may be shorter, or empty.
        limit: largest number of rows in the text of a batch.

    Returns:
        A text for each batch, for example "epoch 0 batch 412 (rows 7, 19)", with the rows as in
        `rows_text`.
    """
    names = []
    for place, (epoch, index) in enumerate(batches):
        name = f"epoch {epoch} batch {index}"
        if place < len(rows):
            name += f" (rows {rows_text(rows[place], limit)})"
        names.append(name)
    return names


def rows_text(rows: Sequence[int], limit: int = _SHOWN_ROWS) -> str:
    """Lists the first rows of a batch, and the number of the others.

    Args:
        rows: the first rows of the batch, at most `MAX_ROWS`.
        limit: largest number of rows in the text.

    Returns:
        The text, for example "7, 19, 4" or "7, 19, ..., 31 and 24 more". An event has at most 64
        rows of a batch, so the text of a larger batch says "and more".
    """
    text = ", ".join(map(str, rows[:limit]))
    rest = len(rows) - limit
    if rest <= 0:
        return text
    if len(rows) >= MAX_ROWS:
        return f"{text} and more"
    return f"{text} and {rest} more"


def alarm_sentence(event: EventRecord) -> str:
    """The sentence of an event `alarm`: `alarm_text`, and the batches of the step."""
    responses = _responses(event)
    parts = [_alarm_without_batches(event, responses)]
    if event.rows:
        limit = _SHOWN_ROWS
        if responses.changes_nothing:
            limit = _FEW_ROWS
        parts += batch_names(event.batches or (), event.rows, limit)
    elif event.skip and event.batches:
        parts.append(first_of(batch_names(event.batches, ()), _SHOWN_BATCHES, "; "))
    return "; ".join(parts)


def over_sentence(event: EventRecord) -> str:
    """The sentence of an event `over`."""
    causes = flags_text(event.cause or ())
    steps = f"steps {event.onset} to {event.last}"
    if event.onset == event.last:
        steps = f"step {event.onset}"
    numbers = ""
    if event.readings:
        numbers = readings_text(event.readings, ())
    return f"incident {event.incident} is over: {causes}, {steps}; {numbers or 'no loss'} now"


def order_sentence(event: EventRecord) -> str:
    """The sentence of an event `order`."""
    verb = "ordered"
    if event.observed:
        verb = "would order"
    actions = ", ".join(flags_text([action]) for action in event.action or ())
    text = f"{verb}: {actions}"
    if event.cause:
        text += f" ({flags_text(event.cause)})"
    return text


def rollback_sentence(event: EventRecord) -> str:
    """The sentence of an event `rollback`."""
    parts = [
        f"rolled back from step {event.step or 0} to the checkpoint of step {event.checkpoint}",
        lr_text(event),
    ]
    if event.batches:
        parts.append(f"{counted(len(event.batches), 'batch', 'batches')} skipped")
    parts += event.held or ()
    if event.moments_reset:
        parts.append("moments reset")
    parts.append(repeat_text(event))
    return _join(parts)


def repeat_text(rollback: EventRecord) -> str:
    """Describes how many of the undone steps are repeated.

    Args:
        rollback: an event `rollback`.

    Returns:
        A clause, for example "12 steps are repeated, 3 steps are not repeated, because ...", or an
        empty string if the event does not have the numbers.
    """
    clauses = []
    if rollback.steps_repeated:
        clauses.append(f"{counted(rollback.steps_repeated, 'step is', 'steps are')} repeated")
    if rollback.steps_lost:
        clause = f"{counted(rollback.steps_lost, 'step is', 'steps are')} not repeated"
        if rollback.why:
            clause += f", because {rollback.why}"
        clauses.append(clause)
    return ", ".join(clauses)


def lr_text(rollback: EventRecord) -> str:
    """Describes the lowered learning rate of a rollback.

    Args:
        rollback: an event `rollback`.

    Returns:
        A clause, for example "learning rate at most 0.0005 (it was 0.001)", or an empty string if
        the rollback did not lower the learning rate.
    """
    limit = rollback.lr_limit
    before = rollback.lr_at_fault
    if before is None:
        before = rollback.lr
    if limit is not None and before is not None:
        is_lowered = limit < before
    else:
        is_lowered = rollback.lr_scale is not None and rollback.lr_scale < 1
    if not is_lowered:
        return ""
    if limit is None:
        return f"learning rate × {rollback.lr_scale:.3g}"
    text = f"learning rate at most {limit:.3g}"
    if rollback.lr_at_fault is not None:
        return f"{text} (it was {rollback.lr_at_fault:.3g})"
    if rollback.lr is not None:
        return f"{text} (the schedule's rate was {rollback.lr:.3g})"
    return text


def lr_sentence(event: EventRecord) -> str:
    """The sentence of an event `lr`."""
    before = event.lr_scale_before
    after = event.lr_scale
    if not before or not after:
        return "learning rate"
    verb = ""
    if event.observed:
        verb = "would be "
    text = f"learning rate {verb}× {after:.3g}, was × {before:.3g}"
    if event.why:
        text += f": {event.why}"
    return text


_ASSESSMENTS = {
    ("unknown", "nothing"): "declined: no evidence that the current weights are worse",
    ("unknown", "budget"): "declined: the budget of rollbacks is exhausted",
    ("damage", "weights"): "the weights are not finite",
    ("damage", "state"): "the state is not finite",
    ("damage", "earlier_weights"): "{weights} are better on the same batches",
    ("worse", "earlier_weights"): "{weights} are better on the same batches",
    ("recovered", "earlier_weights"): "the run has recovered from the damage",
    ("accepted", "earlier_weights"): "damage is not repaired: {weights} are better",
    ("accepted", "intended_numbers"): "damage is not repaired",
    ("accepted", "nothing"): "damage is not repaired",
}
"""(`verdict`, `by`) of an event `assessment` -> sentence."""


def assessment_sentence(event: EventRecord) -> str:
    """The sentence of an event `assessment`."""
    text = _ASSESSMENTS.get((event.verdict or "", event.by or ""))
    weights = "earlier weights"
    if event.checkpoint is not None:  # older versions do not write it
        weights = f"the weights of step {event.checkpoint}"
    if text is None:  # another version has written the verdict
        text = f"assessment: {event.verdict or 'unknown'}"
    else:
        text = text.format(weights=weights)
    if event.onset is not None and event.verdict != "unknown":
        if event.verdict == "recovered":
            text += f" of step {event.onset}"
        else:
            text += f", since step {event.onset}"
    if event.verdict == "worse":
        text += "; the run has time to recover"
    if event.verdict in ("accepted", "recovered") and event.why:
        text += f"; {event.why}"
    return text


_WHY_SAVED = {
    "first": "before the first step",
    "ordered": "as a rule or a hook asks",
    "requested": "as the program asks",
    "rollback": "for a rollback",
    "last": "at the end of the run",
    "emergency": "before an exception ends the run",
}
"""`why` of an event `save` -> clause. A regular save has none."""


def save_sentence(event: EventRecord) -> str:
    """The sentence of an event `save`."""
    text = f"checkpoint {event.step} is copied"
    if event.step is None:
        text = "a checkpoint is copied"
    if event.seconds is not None:
        text += f" in {_duration(event.seconds)}"
    why = event.why or ""
    if why in ("", "regular"):
        return text
    return f"{text}, {_WHY_SAVED.get(why, why)}"


def _duration(seconds: float) -> str:
    """Writes a duration, for example "3.4 ms" or "12 s"."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.3g} s"


def good_sentence(event: EventRecord) -> str:
    """The sentence of an event `good`."""
    step = event.checkpoint
    if step is None:
        step = event.step
    if step is None:
        return "a checkpoint is known-good"
    return f"checkpoint {step} is known-good"


def data_sentence(event: EventRecord) -> str:
    """The sentence of an event `data`."""
    text = event.outcome or ""
    if text == "rewound":
        text = "the data is rewound"
    elif text.startswith("continues forward"):
        text = f"the data {text}"
    if not event.settings:
        return text
    settings = ", ".join(f"{name} {value}" for name, value in event.settings.items())
    return _join([text, settings], ": ")


def skipped_batches_sentence(event: EventRecord) -> str:
    """The sentence of an event `skipped_batches`."""
    names = batch_names(event.batches or (), event.rows or ())
    if not names:
        return ""
    return f"skipped: {', '.join(names)}"


def hook_sentence(event: EventRecord) -> str:
    """The sentence of an event `hook`."""
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    replaced = flags_text(event.ordered or ())
    replacement = flags_text(event.action or ()) or "nothing"
    return f"the hook {event.hook or ''} changed {replaced} to {replacement}"


_ANSWERS = {
    "shrink_microbatch": "the batch is split into smaller parts",
    "skip_batch": "the batch is skipped",
    "retry": "the call is repeated",
    "save": "the state is saved",
}
"""`EventRecord.answer` -> clause."""


def fault_sentence(event: EventRecord) -> str:
    """The sentence of an event `fault`."""
    text = f"fault: {flags_text(event.cause or ()) or 'unknown'}"
    if event.severity:
        text += f" ({event.severity})"
    text += f": {event.problem}"
    if event.answer:
        text += f"; {_ANSWERS.get(event.answer, event.answer.replace('_', ' '))}"
    return text
