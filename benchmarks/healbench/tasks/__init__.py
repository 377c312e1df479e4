"""The tasks, by name: one file per family, each with a tuple `TASKS`."""

from __future__ import annotations

from benchmarks.healbench.problem import Task
from benchmarks.healbench.tasks import (
    adversarial,
    changing_objectives,
    generative,
    learning_rates,
    mixed_data,
    noisy,
    reinforcement,
    shifting_data,
    sick_arithmetic,
    sick_data,
    sick_state,
    stationary,
)

_FAMILIES = (
    stationary,
    generative,
    noisy,
    shifting_data,
    changing_objectives,
    mixed_data,
    adversarial,
    reinforcement,
    learning_rates,
    sick_data,
    sick_arithmetic,
    sick_state,
)

TASKS: dict[str, Task] = {task.name: task for family in _FAMILIES for task in family.TASKS}
