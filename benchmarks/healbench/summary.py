"""Writes the tables of docs/evidence.md and docs/healbench.md.

    python -m benchmarks.healbench.summary            # writes and prints them
    python -m benchmarks.healbench.summary --print    # only prints them

The tables are made from `benchmarks/results/healbench.jsonl`. Rows of the peers are of torch and of
one seed, because the peers are run with one seed. The command also prints what has no table: the
exceptions, and the forward passes of the comparisons.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

from benchmarks.healbench import comparing
from benchmarks.healbench.__main__ import PAGE, RESULTS, all_tasks
from benchmarks.healbench.comparing import Cell
from benchmarks.healbench.running import UNAVAILABLE, Result, read_results
from benchmarks.healbench.table import markdown, write_between

EVIDENCE = PAGE.with_name("evidence.md")
SEED = 0
ARMS = {
    "nothing": "no protection",
    "attach_default": "`attach` or `protect`",
    "healer": "`Healer`",
    "healer_ask": "`Healer` with a `loss_fn`",
}
"""The arms of the promise."""
PEERS = {
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
    "optimizer numbers": "wrong beta, momentum, weight decay",
    "gradients": "wrong gradients",
    "shifted labels": "shifted labels",
}
"""Families of the faulty tasks, with the names that the pages use."""
KINDS = ("healthy", "faulty")
FRAMEWORK_NAMES = {"torch": "torch", "jax": "JAX"}
MOMENTS = {"_early": "early", "_middle": "in the middle", "_late": "late"}
"""How the names of tasks end -> the part of the run in which their fault begins."""


def promise(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """One row for each arm: healthy tasks that hold, and the cure of each family of faults.

    A cure is the mean over all seeds, with the lowest and highest mean of one seed.
    """
    yield ["", "healthy tasks not harmed", *FAMILIES.values()]
    for arm, title in ARMS.items():
        its = [cell for cell in cells if cell.arm == arm]
        healthy = [cell for cell in its if cell.task.kind == "healthy"]
        kept = f"{sum(cell.holds for cell in healthy)} of {len(healthy)}"
        cures = []
        for family in FAMILIES:
            cures.append(_cure([cell for cell in its if cell.task.family == family]))
        yield [title, "" if arm == comparing.OFF else kept, *cures]


def _cure(cells: Sequence[Cell]) -> str:
    """The mean ratio of a family over tasks and seeds, with the lowest and highest of one seed."""
    seeds = sorted({seed for cell in cells for seed in cell.ratios})
    by_seed = [
        comparing.geometric_mean(cell.ratios[seed] for cell in cells if seed in cell.ratios)
        for seed in seeds
    ]
    mean = comparing.geometric_mean(cell.ratio for cell in cells if cell.ratios)
    low, high = (_shown(each) for each in (min(by_seed), max(by_seed))) if seeds else ("", "")
    return _shown(mean) if low == high else f"{_shown(mean)} ({low} to {high})"


def _shown(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 2 else 1 if ratio < 10 else 0}f}"


def frameworks(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """One row for each family of faults: without and with a `loss_fn`, in torch and in JAX."""
    columns = [(name, arm) for name in ("torch", "jax") for arm in (comparing.OFF, "healer_ask")]
    yield ["fault", *(f"{FRAMEWORK_NAMES[name]}, {ARMS[arm]}" for name, arm in columns)]
    for family, title in FAMILIES.items():
        row = [title]
        for name, arm in columns:
            its = [cell for cell in cells if (cell.framework, cell.arm) == (name, arm)]
            row.append(_cure([cell for cell in its if cell.task.family == family]))
        yield row


def moments(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """One row for each family of faults and each part of the run in which its faults begin."""
    yield ["fault", "when", "tasks", ARMS[comparing.OFF], ARMS["healer_ask"]]
    for family, title in FAMILIES.items():
        for moment, words in MOMENTS.items():
            its = [c for c in cells if c.task.family == family and c.task.name.endswith(moment)]
            off, ours = ([c for c in its if c.arm == arm] for arm in (comparing.OFF, "healer_ask"))
            if off:
                yield [title, words, str(len(off)), _cure(off), _cure(ours)]


def exceptions(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """Tasks that are harmed, healthy runs that were rolled back, and faulty runs that end worse."""
    off = {cell.name: cell.metrics for cell in cells if cell.arm == comparing.OFF}
    yield ["task", "", "what", "healcore", "no protection"]
    for cell in (each for each in cells if each.arm in (*ARMS,)[1:]):
        start = [f"`{cell.name}`", ARMS[cell.arm]]
        if cell.task.kind == "healthy":
            if not cell.holds:
                low = f"; {cell.rate_left_low} of {len(cell.runs)} end at a lower rate"
                text = comparing.shown(cell.against) + low * bool(cell.rate_left_low)
                yield [*start, f"harmed: {text}", "", ""]
            for run in (run for run in cell.runs if run.rollbacks):
                plain = off[cell.name][run.seed]
                yield [*start, f"seed {run.seed}, rolled back", f"{run.value:.3g}", f"{plain:.3g}"]
        elif cell.arm == "healer_ask":
            ratios = {s: cell.metrics.get(s, math.inf) / x for s, x in off[cell.name].items()}
            worse = [s for s, ratio in ratios.items() if ratio > 1 + comparing.MARGIN / 100]
            if worse:
                worst = max(worse, key=lambda seed: ratios[seed])
                ours, plain = cell.metrics.get(worst, math.nan), off[cell.name][worst]
                text = f"{len(worse)} of {len(cell.runs)} seeds end worse; the worst:"
                yield [*start, text, f"{ours:.3g}", f"{plain:.3g}"]


def peers(results: Sequence[Result]) -> Iterator[list[str]]:
    """One row for each arm and each peer."""
    there = [each for each in results if each.status != UNAVAILABLE]
    some = [each for each in there if each.framework == "torch" and each.seed == SEED]
    cells = comparing.compare(some, all_tasks())
    metrics = {(cell.task.name, cell.arm): cell.metrics for cell in cells}
    counts = [sum(c.arm == comparing.OFF and c.task.kind == k for c in cells) for k in KINDS]
    yield [
        "",
        f"healthy of {counts[0]}, against no protection",
        f"healthy of {counts[0]}, against a clip to 1.0",
        *FAMILIES.values(),
        "all faulty tasks",
        f"lost of {counts[1]}",
    ]
    for arm in (each for each in PEERS if any(cell.arm == each for cell in cells)):
        its = [cell for cell in cells if cell.arm == arm]
        healthy = [cell for cell in its if cell.task.kind == "healthy"]
        row = [PEERS[arm]]
        for off in (comparing.OFF, "fixed_clip"):  # some peers clip by themselves
            against = [comparing.difference(c.metrics, metrics[c.task.name, off]) for c in healthy]
            row.append(str(sum(not d.percent > comparing.MARGIN for d in against)))
        faulty = [cell for cell in its if cell.task.kind == "faulty"]
        ratios = {
            cell.name: _ratio(cell.metrics, metrics[cell.task.reference, "nothing"])
            for cell in faulty
        }
        for family in (*FAMILIES, ""):
            some = [ratios[cell.name] for cell in faulty if family in ("", cell.task.family)]
            row.append(f"{comparing.geometric_mean(some):.2f}")
        lost = sum(ratio >= comparing.CAP for ratio in ratios.values())
        yield [*row, str(lost)]


def _ratio(faulty: dict[int, float], undamaged: dict[int, float]) -> float:
    """A run without a finite metric counts as `comparing.CAP`, like a run that is lost."""
    ratio = faulty.get(SEED, math.nan) / undamaged[SEED]
    return ratio if ratio < comparing.CAP else comparing.CAP


def passes(cells: Sequence[Cell], *, rolled_back: bool) -> float:
    """Forward passes for comparisons per 1,000 steps of healthy runs with a `loss_fn`."""
    its = [c for c in cells if c.arm == "healer_ask" and c.task.kind == "healthy"]
    runs = [run for cell in its for run in cell.runs if rolled_back or not run.rollbacks]
    counts = [run.evidence for run in runs if run.evidence]  # of torch; JAX tasks count none
    return 1e3 * sum(c["passes"] for c in counts) / sum(c["steps"] for c in counts)


def main() -> None:
    """Writes the tables into their pages, or only prints them, and prints the exceptions."""
    results = read_results(RESULTS)
    cells = comparing.compare([run for run in results if run.arm in ARMS], all_tasks())
    tables = {
        "promise": (EVIDENCE, promise(cells)),
        "other tools": (EVIDENCE, peers(results)),
        "frameworks": (PAGE, frameworks(cells)),
        "moments": (PAGE, moments(cells)),
    }
    for name, (page, rows) in tables.items():
        text = markdown(list(rows))
        print(f"{page.name}, {name}:\n\n{text}\n")
        if "--print" not in sys.argv:
            write_between(page, text, name)
    print(markdown(list(exceptions(cells))) + "\n")
    print(f"{sum(len(cell.runs) for cell in cells):,} runs of the arms of the promise")
    few, all_ = (passes(cells, rolled_back=each) for each in (False, True))
    print(f"passes in 1,000 steps: {few:.0f}; with the runs that were rolled back {all_:.0f}")


if __name__ == "__main__":
    main()
