"""The table of peers in docs/evidence.md: `python -m benchmarks.healbench.peers` prints it.

All rows are of torch and of one seed, because the peers are run with one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.healbench import comparing
from benchmarks.healbench.__main__ import RESULTS, all_tasks
from benchmarks.healbench.running import read_results
from benchmarks.healbench.table import markdown

SEED = 0
ROWS = {
    "nothing": "no protection",
    "fixed_clip": "clip to 1.0",
    "attach_default": "healcore, `attach`",
    "healer": "healcore, `Healer`",
    "healer_ask": "healcore, `Healer` with a `loss_fn`",
    "healer_pretraining": "healcore, `Healer`, `pretraining`",
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
KINDS = ("healthy", "sick")


def figures() -> Iterator[list[str]]:
    """The heading, then one row for each arm."""
    results = [r for r in read_results(RESULTS) if r.framework == "torch" and r.seed == SEED]
    cells = comparing.compare(results, all_tasks())
    metrics = {(cell.task.name, cell.arm): cell.metrics for cell in cells}
    counts = [sum(c.arm == comparing.OFF and c.task.kind == k for c in cells) for k in KINDS]
    yield [
        "",
        f"healthy of {counts[0]}, against no protection",
        f"healthy of {counts[0]}, against a clip to 1.0",
        *FAMILIES.values(),
        "all sick tasks",
        f"lost of {counts[1]}",
    ]
    for arm, title in ROWS.items():
        its = [cell for cell in cells if cell.arm == arm]
        healthy = [cell for cell in its if cell.task.kind == "healthy"]
        row = [title]
        for off in (comparing.OFF, "fixed_clip"):  # some peers clip by themselves
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
