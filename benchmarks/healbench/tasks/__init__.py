"""The tasks, by name: one file per family, each with a tuple `TASKS`."""

from __future__ import annotations

import dataclasses
from types import ModuleType

from benchmarks.healbench.problem import Task
from benchmarks.healbench.tasks import (
    accumulation,
    adversarial,
    changing_objectives,
    generative,
    later_terms,
    learning_rates,
    loud_sources,
    middle_faults,
    mixed_data,
    noise_switched_on,
    noisy,
    optimizers,
    projections,
    rate_by_design,
    regularization,
    reinforcement,
    restarts,
    scale_changes,
    shifting_data,
    sick_arithmetic,
    sick_data,
    sick_state,
    stationary,
    teachers,
    weight_edits,
    weight_resets,
)

_FAMILIES: dict[ModuleType, str] = {
    stationary: "stationary",
    generative: "likelihoods",
    noisy: "noise",
    shifting_data: "changing data",
    scale_changes: "scale changes",
    changing_objectives: "changing objective",
    mixed_data: "mixes",
    loud_sources: "mixes",
    rate_by_design: "learning rate by design",
    weight_edits: "weight edits",
    weight_resets: "weight edits",
    projections: "penalties and projections",
    restarts: "restarts",
    noise_switched_on: "noise switched on",
    teachers: "teachers and queues",
    later_terms: "terms after the loss",
    accumulation: "accumulation",
    optimizers: "optimizers",
    regularization: "regularization",
    adversarial: "rises by design",
    reinforcement: "rises by design",
    learning_rates: "learning rate",
    middle_faults: "learning rate",
    sick_state: "damage",
    sick_data: "poisoned data",
    sick_arithmetic: "arithmetic",
}
"""Family of the tasks of each module, except where a task names its own."""

TASKS: dict[str, Task] = {
    task.name: dataclasses.replace(task, family=task.family or family)
    for module, family in _FAMILIES.items()
    for task in module.TASKS
}
