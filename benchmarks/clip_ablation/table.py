"""Ratios of the errors with and without a clip, as tables."""

from __future__ import annotations

import numpy as np

from benchmarks.clip_ablation.rules import Variant
from benchmarks.clip_ablation.tasks import Task

STUDENT = 2.13
"""95 % quantile of Student's t with 4 degrees of freedom: five paired seeds, one-sided."""
NOISE = 1.01


def ratio(errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Geometric mean of error / error without a clip over the seeds, and whether that is harm.

    Harm: above 1 % and beyond noise (paired t-test over the seeds).
    """
    logs = np.log(errors) - np.log(errors[0])
    mean = logs.mean(1)
    error = logs.std(1, ddof=1) / np.sqrt(logs.shape[1])
    return np.exp(mean), (mean > np.log(NOISE)) & (mean > STUDENT * error)


def print_tables(
    tasks: list[Task], variants: list[Variant], errors: dict[str, np.ndarray], *, details: bool
) -> None:
    """One row for each variant: geometric mean, worst task and number of harmed tasks by group."""
    found = {task.name: ratio(errors[task.name]) for task in tasks}
    groups = sorted({task.group for task in tasks})
    print("variant".ljust(40) + "".join(f"{g}: mean  worst harmed".rjust(28) for g in groups))
    for i, variant in enumerate(variants):
        row = variant.name.ljust(40)
        for group in groups:
            names = [task.name for task in tasks if task.group == group]
            ratios = np.array([found[name][0][i] for name in names])
            harmed = sum(found[name][1][i] for name in names)
            mean, worst = np.exp(np.log(ratios).mean()), ratios.max()
            row += f"{mean:.3f} {worst:8.3f} {harmed:2d}/{len(names)}".rjust(28)
        print(row)
    if details:
        print()
        for task in tasks:
            print(task.group, task.name, f"(off {np.exp(np.log(errors[task.name][0]).mean()):.3g})")
            for i, variant in enumerate(variants[1:], 1):
                value, harm = found[task.name][0][i], found[task.name][1][i]
                print(f"    {variant.name:40} {value:8.3f}{' harmed' if harm else ''}")
