"""The tasks, by name: one file per family, which registers its tasks in `TASKS`."""

from __future__ import annotations

from benchmarks.healbench.problem import TASKS
from benchmarks.healbench.tasks import (  # noqa: F401
    accumulation,
    adversarial,
    changing_objectives,
    generative,
    gradient_faults,
    learning_rates,
    middle_faults,
    mixed_data,
    noise_switched_on,
    noisy,
    optimizers,
    projections,
    reinforcement,
    restarts,
    scale_changes,
    shifted_labels,
    shifting_data,
    short_runs,
    sick_arithmetic,
    sick_data,
    stationary,
    teachers,
    weight_edits,
    wrong_numbers,
)

__all__ = ["TASKS"]
