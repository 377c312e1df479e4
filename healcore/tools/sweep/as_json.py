"""A sweep as strict JSON."""

from __future__ import annotations

from typing import Any

from healcore.policy import fingerprint
from healcore.tools.sweep.objective import rates_of
from healcore.tools.sweep.search import Sweep
from healcore.tools.sweep.telling import notes, objective

SCHEMA = 1

_SHOWN = 20  # settings of the ranking


def to_json(found: Sweep) -> dict[str, Any]:
    """The sweep as JSON-safe data: every number finite, or null where there is none to give."""
    verdict, choice = found.verdict, found.verdict.choice
    ranked = sorted(range(len(verdict.scores)), key=lambda i: -verdict.scores[i])[:_SHOWN]
    checked = verdict.validation
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "policy": found.base.name,
        "fingerprint": fingerprint(found.base),
        "objective": found.plan.objective,
        "objective_words": objective(found),
        "within": found.plan.costs.within,
        "price": found.plan.price,
        "recovery_steps": found.plan.costs.recovery,
        "runs": found.runs,
        "attempts": len(found.series),
        "labelled_runs": found.labelled,
        "rows": verdict.rates.rows,
        "events": verdict.rates.events,
        "variants": len(found.variants.values),
        "backend": found.backend,
        "policy_steps": found.policy_steps,
        "seconds": round(found.seconds, 3),
        "axes": [
            {"key": a.key, "low": a.low, "high": a.high, "log": a.log, "values": list(a.listed)}
            for a in found.variants.axes
        ],
        "take": "new" if verdict.take else "base",
        "reason": verdict.reason,
        "taken_fingerprint": fingerprint(found.policy),
        "base": _setting(found, 0),
        "chosen": _setting(found, choice.index),
        "best": _setting(found, choice.best),
        "ranking": [_setting(found, i) for i in ranked],
        "plateau_size": int(choice.plateau.sum()),
        "held_out": None
        if checked is None
        else {
            "splits": checked.splits,
            "by": found.splits.by,
            "families": found.splits.families,
            "share": found.plan.holdout,
            "worse_than_base": checked.worse,
            "events": list(checked.events),
            "events_in_some_split": checked.ever,
            **{
                name: {**each._asdict(), "gap": each.gap}
                for name, each in zip(
                    ("base", "chosen", "best"),
                    (checked.base, checked.chosen, checked.best),
                    strict=True,
                )
            },
        },
        "notes": notes(found),
        "left_out": [each._asdict() for each in found.left_out],
        "failed": [each._asdict() for each in found.failed],
    }


def _setting(found: Sweep, i: int) -> dict[str, Any]:
    values = {
        axis.key: round(v) if axis.whole else v
        for axis, v in zip(found.variants.axes, found.variants.values[i].tolist(), strict=True)
    }
    scores = {"score": found.verdict.scores[i], "smooth": found.verdict.choice.smooth[i]}
    return {
        "values": values,
        **{k: float(v) for k, v in scores.items()},
        **rates_of(found.verdict.rates, found.tallies, i),
    }
