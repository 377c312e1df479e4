"""Describes incidents for the page of a run: batches, learning rates, and what was done."""

from __future__ import annotations

from healcore.console import counted
from healcore.events.kinds import flags_text, lr_text, sentence
from healcore.history import Incident, Mode


def cause_text(incident: Incident) -> str:
    """The causes of an incident, such as "nonfinite loss", or why the run was rolled back."""
    reasons = [event.why for event in incident.responses if event.why]
    return flags_text(incident.cause) or (reasons[0] if reasons else "a rollback without an alarm")


def batches_text(incident: Incident) -> str:
    """Describes the batches of an incident: their epoch, the first and the last.

    Args:
        incident: an incident. If batches were skipped, only these are described.

    Returns:
        A text such as "epoch 0: 7–12 (6 skipped)", or an empty string without batches.
    """
    batches = sorted(incident.skipped_batches or incident.first.batches or ())
    if not batches:
        return ""
    (epoch, first), (last_epoch, last) = batches[0], batches[-1]
    text = f"epoch {epoch}: {step_range(first, last)}"
    if epoch != last_epoch:
        text = f"epoch {epoch}: {first} to epoch {last_epoch}: {last}"
    if incident.skipped_batches:
        text += f" ({len(batches)} skipped)"
    return text


def step_range(first: float, last: float) -> str:
    """Formats a range of steps.

    Args:
        first: the first step.
        last: the last step, which may be the first.

    Returns:
        A text such as "7" or "7–12".
    """
    if first == last:
        return f"{first:.0f}"
    return f"{first:.0f}–{last:.0f}"


_LONGEST_PATH = 6
"""Limit of the multipliers of an incident that the table lists."""


def rate_changes(incident: Incident) -> str:
    """Describes what an incident has changed of the learning rate.

    Args:
        incident: an incident with its responses.

    Returns:
        The multipliers, such as "× 1 → 0.25", then the limits that rollbacks have set, such as "at
        most 0.00571 (it was 0.0884)"; empty if nothing was changed.
    """
    changes: list[str] = []
    path = [f"{scale:.4g}" for scale in incident.lr_path]
    if len(path) > _LONGEST_PATH:
        path = [path[0], "…", path[-1]]
    if len(path) > 1:
        changes.append(f"× {' → '.join(path)}")
    for event in incident.responses:
        if event.kind == "rollback" and event.lr_limit is not None:
            changes.append(lr_text(event).removeprefix("learning rate "))
    return "; ".join(filter(None, changes))


def response_text(incident: Incident) -> str:
    """Describes what was done about an incident.

    Args:
        incident: an incident of a healed run, of a run that was only observed, or of a replay.

    Returns:
        The responses of the run, such as "skipped 3 steps, then training continued". For an
        observed run or a replay, what the policy would have done.
    """
    if incident.mode is Mode.REPLAY:
        return _would_text(incident)
    responses = [sentence(event) for event in incident.responses]
    skipped = ""
    if incident.skipped:
        skipped = f"skipped {skipped_text(incident)}"
    if responses and incident.declined and skipped:
        responses.insert(0, skipped)
    if incident.mode is Mode.OBSERVE:
        return "; ".join(["only observed, nothing changed", _would_text(incident), *responses])
    if responses:
        return "; ".join(responses)
    if skipped:
        return f"{skipped}, then training continued"
    return "training continued"


def skipped_text(incident: Incident) -> str:
    """Describes the number of skipped steps.

    Args:
        incident: an incident, which counts its skipped steps up to a limit.

    Returns:
        A text such as "3 steps", or "100 steps or more".
    """
    text = counted(incident.skipped, "step")
    if incident.capped:
        text += " or more"
    return text


def _would_text(incident: Incident) -> str:
    """What the policy would have done, if its orders had been carried out."""
    parts: list[str] = []
    if incident.skipped:
        parts.append(f"skipped {skipped_text(incident)}")
    if incident.clipped:
        parts.append(f"clipped {counted(incident.clipped, 'step')}")
    if "ROLLBACK" in incident.action:
        parts.append("rolled back")
    if "STOP" in incident.action:
        parts.append("stopped the run")
    if not parts:
        return "alert only"
    return f"would have {', '.join(parts)}"
