"""What stands below the tables of `healcore replay`: what rests, attempts, and a legend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from healcore.tools.replay.running import Result
from healcore.tools.replay.scoring import IN_TIME
from healcore.tools.replay.summary import Summary
from healcore.tools.replay.table import listed

SCORED = (
    f"found: labelled events met by such orders (in time: within {IN_TIME} rows). "
    "false: orders elsewhere, those within 40 rows as one. latency: median."
)

_MOST_ATTEMPTS = 8


def legend(results: Sequence[Result]) -> str:
    """What the columns mean that have something in them; and the backend."""
    all_ = [result.summary for result in results]
    told = []
    if any(each.incidents for each in all_):
        told.append("incidents: runs of alarms that the policy acts on.")
    if any(each.rollbacks for each in all_):
        rollbacks = "rollbacks: the first of each incident"
        if any(each.repeats for each in all_):
            rollbacks += "; again: had it not helped, for a recorded curve does not heal"
        if any(each.spent for each in all_):
            rollbacks += "; unpaid: beyond the budget"
        told.append(rollbacks + ".")
    if any(each.lowest_lr_first < 1 for each in all_):
        told.append("lowest LR: multiplier (cuts).")
    if any(each.stopped_step is not None for each in all_):
        told.append("ends at: where a live run would stop, at the earliest.")
    return " ".join([*told, f"Judged with {results[0].backend}."])


def notes(results: Sequence[Result]) -> list[str]:
    """What rests, what happened in each attempt, and the rows without a judgement."""
    told = _resting(results)
    told += [_by_attempt(each.summary) for each in results if len(each.summary.attempts) > 1]
    unjudged = sum({each.summary.trace: each.summary.unjudged for each in results}.values())
    if unjudged:
        rows = "1 row" if unjudged == 1 else f"{unjudged:,} rows"
        told.append(f"{rows} without a loss and a gradient norm: not judged")
    return told


def _resting(results: Sequence[Result]) -> list[str]:
    """A line for each signal that is missing somewhere, however many policies read it."""
    traces = {each.summary.trace for each in results}
    without: dict[str, set[str]] = defaultdict(set)
    rests: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in results:
        for signal, parts in each.missing.items():
            without[signal].add(each.summary.trace)
            for part in parts:
                # Of clipping, the kind does not matter: it is the norm that is not there.
                rests[signal][part.partition(" ")[0]].add(each.summary.policy)
    several = len({each.summary.policy for each in results}) > 1
    told = []
    for signal, parts in sorted(rests.items()):
        logged = "logged" if signal != "group_norms" else "in any log (AdaGC reads every tensor's)"
        where = "" if without[signal] == traces else f" in {len(without[signal])} of {len(traces)}"
        where += " traces" if where else ""
        who = [
            f"{part} ({_policies(policies)})" if several else part
            for part, policies in parts.items()
        ]
        verb = "rests" if len(who) == 1 else "rest"
        told.append(f"no {signal} {logged}{where}: {listed(who)} {verb}")
    return told


def _policies(policies: set[str]) -> str:
    return next(iter(policies)) if len(policies) == 1 else f"{len(policies)} policies"


def _by_attempt(summary: Summary) -> str:
    """What happened in each attempt of a run that was resumed."""
    parts = [
        f"{each.incidents} / {each.rollbacks - each.repeats} from step {each.first_step:.15g} on"
        for each in summary.attempts[:_MOST_ATTEMPTS]
    ]
    more = len(summary.attempts) - len(parts)
    return (
        f"{summary.trace}, {summary.policy}: incidents / rollbacks of its {len(summary.attempts)} "
        f"attempts: {', '.join(parts)}{f', and {more} more' if more else ''}"
    )
