"""The table of peers in docs/evidence.md: `python -m benchmarks.healbench.peers` prints it.

All rows are of torch and of one seed, because the peers have been run with one seed.
The digests of the results are checked by `python -m benchmarks.healbench --report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.healbench import comparing
from benchmarks.healbench.__main__ import RUNS
from benchmarks.healbench.running import Job, Store, suite
from benchmarks.healbench.table import markdown

SEED = 0
ROWS = {
    "nothing": "no protection",
    "fixed_clip": "clip to 1.0",
    "attach_default": "healcore, `attach`",
    "healer": "healcore, `Healer`",
    "healer_ask": "healcore, `Healer` with a `loss_fn`",
    "attach_clip": "healcore, `attach`, clip to 1.0",
    "healer_clip": "healcore, `Healer`, clip to 1.0",
    "healer_ask_clip": "healcore, `Healer` with a `loss_fn`, clip to 1.0",
    "attach_pretraining": "healcore, `attach`, `pretraining`",
    "zclip": "ZClip",
    "adagc": "AdaGC",
    "lightning_spike": "Lightning SpikeDetection",
    "olmo_skip_step": "OLMo skip-step",
    "selgis": "selgis",
    "self_healing_trainer": "self-healing-trainer",
}
FAMILIES = {
    "learning rate": "wrong learning rate",
    "damage": "damaged weights",
    "poisoned data": "corrupt data",
    "arithmetic": "NaN, Inf, overflow",
}
"""Families of the sick tasks, with the names that the pages use."""


def figures() -> Iterator[list[str]]:
    """The heading, then one row for each arm."""
    tasks = suite("torch").tasks
    jobs = [Job("torch", task, arm, SEED) for task in tasks for arm in ROWS]
    store = Store(RUNS)
    results = [result for job in jobs if (result := store.read(job)) is not None]
    cells = comparing.compare(results, {("torch", name): task for name, task in tasks.items()})
    metrics = {(cell.task.name, cell.arm): cell.metrics for cell in cells}
    yield [
        "",
        "healthy of 75, against no protection",
        "healthy of 75, against a clip to 1.0",
        *FAMILIES.values(),
        "all sick tasks",
        "lost of 42",
    ]
    for arm, title in ROWS.items():
        its = [cell for cell in cells if cell.arm == arm]
        healthy = [cell for cell in its if cell.task.kind == "healthy"]
        row = [title]
        for off in comparing.HINDSIGHT:
            against = [comparing.difference(c.metrics, metrics[c.task.name, off]) for c in healthy]
            row.append(str(sum(not d.percent > comparing.MARGIN for d in against)))
        sick = [cell for cell in its if cell.task.kind == "sick"]
        ratios = {
            cell.name: _ratio(cell.metrics, metrics[cell.task.reference, "nothing"])
            for cell in sick
        }
        for family in (*FAMILIES, ""):
            some = [ratios[cell.name] for cell in sick if family in ("", cell.task.family)]
            row.append(f"{comparing.geometric_mean(some):.2f}")
        lost = sum(ratio >= comparing.CAP for ratio in ratios.values())
        yield [*row, str(lost)]


def _ratio(sick: dict[int, float], undamaged: dict[int, float]) -> float:
    """A run without a finite metric counts as `comparing.CAP`, like a run that is lost."""
    ratio = sick.get(SEED, math.nan) / undamaged[SEED]
    return ratio if ratio < comparing.CAP else comparing.CAP


if __name__ == "__main__":
    print(markdown(list(figures())))
