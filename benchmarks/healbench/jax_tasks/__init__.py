"""healbench in JAX and optax.

A task takes its data, its initial weights, the numbers of its optimizer and its metric from the
torch task of the same name (problem.py), so that both train the same program. models.py has the
models and losses, healthy.py, loops.py, faulty.py and short_runs.py the tasks, arms.py what they
are trained with.
"""

from __future__ import annotations

from benchmarks.healbench.jax_tasks import faulty, healthy, loops, short_runs
from benchmarks.healbench.jax_tasks.arms import ARMS
from benchmarks.healbench.problem import Task

__all__ = ["ARMS", "TASKS"]

TASKS: dict[str, Task] = {
    task.name: task for family in (healthy, loops, faulty, short_runs) for task in family.TASKS
}
"""A subset of the torch tasks, by the same names. `build` gives a `jax_tasks.problem.Problem`."""
