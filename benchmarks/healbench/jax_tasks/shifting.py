"""Healthy runs whose data change on the way; see tasks/{shifting_data,mixed_data}.py."""

from __future__ import annotations

from benchmarks.healbench.jax_tasks.models import classification, regression
from benchmarks.healbench.jax_tasks.problem import task
from benchmarks.healbench.problem import Task

TASKS: tuple[Task, ...] = (
    task("task_every_300", regression, quick=True),
    task("domain_change", classification),
    task("curriculum", regression),
    task("sorted_stream", classification),
    task("two_domains_alternating", classification),
    task("harder_noise", regression),
    task("rare_class_12", classification),
    task("rare_class_60", classification, quick=True),
    task("rare_class_300", classification),
)
