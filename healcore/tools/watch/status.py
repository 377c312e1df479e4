"""The state of a run in three lines."""

from __future__ import annotations

from healcore.tools.watch.state import Standing
from healcore.tools.watch.wording import plain


def lines(standing: Standing) -> list[str]:
    """How the run stands; without what is not known."""
    start = standing.start
    ending = standing.ending
    head = [
        "running"
        if ending is None
        else "completed"
        if ending == "completed"
        else f"ended: {ending}",
        f"step {standing.step:,}" if standing.step is not None else "",
        f"{standing.speed:.3g} steps/s" if standing.speed and ending is None else "",
        f"policy {start['policy']}" if "policy" in start else "",
        "it only observes: nothing is done" if standing.observes else "",
        start.get("framework", ""),
    ]
    budget = standing.budget
    skipped = f"{standing.skipped}{' or more' if standing.capped else ''} steps"
    done = [
        f"{skipped} skipped" if standing.skipped else "",
        _spent("rollback", standing.rollbacks, budget and budget.recoveries),
        _spent("LR cut", standing.cuts, budget and budget.lr_cuts),
    ]
    if standing.observes:
        done = [_would(standing, skipped)]
    good = f"last known-good: {_or_none(standing.last_good)}"
    counts = [_incidents(standing), *done, good]
    told = [" · ".join(each for each in row if each) for row in (head, _numbers(standing), counts)]
    return [plain(row) for row in told if row]


def _numbers(standing: Standing) -> list[str]:
    found = standing.metrics
    limit = f" (limit {found['threshold']:.4g})" if "threshold" in found else ""
    scale = standing.lr_scale
    return [
        f"loss {found['loss']:.5g}" if "loss" in found else "",
        f"gradient norm {found['grad_norm']:.4g}{limit}" if "grad_norm" in found else "",
        f"learning rate {'would be ' * standing.observes}× {scale:.3g}"
        if scale is not None
        else "",
    ]


def _would(standing: Standing, skipped: str) -> str:
    """What a policy that acts would have done."""
    back, cuts = standing.rollbacks, standing.cuts
    told = [
        f"skipped {skipped}" if standing.skipped else "",
        f"gone back {_times(back)}" if back else "",
        f"cut the learning rate {_times(cuts)}" if cuts else "",
        "stopped" if standing.stops else "",
    ]
    return f"it would have {', '.join(each for each in told if each)}" if any(told) else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _incidents(standing: Standing) -> str:
    if not standing.incidents:
        return "no incident"
    last = "" if standing.latest is None else f", the last at step {standing.latest:,}"
    return f"{standing.incidents} incident{'s' * (standing.incidents > 1)}{last}"


def _spent(what: str, count: int, of: int | None) -> str:
    """How often; a budget is refunded after long health, which no event tells of."""
    budget = "" if of is None else f" (budget {of})"
    return f"{count} {what}{'s' * (count != 1)}{budget}"


def _or_none(step: int | None) -> str:
    return "none yet" if step is None else f"step {step:,}"
