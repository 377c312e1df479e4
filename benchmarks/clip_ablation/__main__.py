"""What a rule of clipping does to a run, against the same run without it: a table of ratios.

python -m benchmarks.clip_ablation [--tasks NAME ...] [--grid candidates] [--seeds 5]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from benchmarks.clip_ablation import rules
from benchmarks.clip_ablation.grids import GRIDS
from benchmarks.clip_ablation.optimizers import OPTIMIZERS
from benchmarks.clip_ablation.problems import problem
from benchmarks.clip_ablation.rules import Variant
from benchmarks.clip_ablation.table import print_tables
from benchmarks.clip_ablation.tasks import TASKS, Task

WORST = 1e6
"""Largest test error that counts."""


def train(task: Task, variants: list[Variant], seeds: int) -> np.ndarray:
    """Test error of each variant and seed (variants, seeds): mean over the run's last fifth."""
    g = torch.Generator().manual_seed(1 + [t.name for t in TASKS].index(task.name))
    made = problem(g, seeds, task.model, task.data, task.error, task.steps)
    n = len(variants)
    parameters = [p.repeat(n, *[1] * (p.ndim - 1)).requires_grad_() for p in made.parameters]
    update = OPTIMIZERS[task.optimizer](parameters, task.lr)
    limit = rules.limits(variants, seeds)
    tests, errors = [], []
    for share, (x, y, weight) in made.tests:
        tests.append((share * weight.repeat(n), x.repeat(n, 1, 1), y.repeat(n, 1, 1)))
    for step in range(task.steps):
        batch = made.batch(step)
        if task.fault is not None:
            batch = task.fault.apply(g, step, batch)
        x, y, weight = batch
        output = made.forward(parameters, x.repeat(n, 1, 1))
        loss = made.error(output, y.repeat(n, 1, 1)).mean(-1) * weight.repeat(n)
        gradients = list(torch.autograd.grad(loss.sum(), parameters, materialize_grads=True))
        with torch.no_grad():
            norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            norms = np.nan_to_num(norm.double().numpy(), nan=np.inf)
            largest = limit(norms, loss.detach().double().numpy())
            # A step that is not finite is skipped in every variant, also in that without a clip.
            over = np.isfinite(norms) & (norms > largest)
            with np.errstate(invalid="ignore"):
                factor = np.where(over, largest / (norms + 1e-6), 1.0)
            scale = torch.from_numpy(np.where(np.isfinite(norms), factor, 0.0)).float()
            gradients = [
                torch.nan_to_num(g) * scale.view(-1, *[1] * (g.ndim - 1)) for g in gradients
            ]
            update(parameters, gradients, step + 1)
            if step >= 0.8 * task.steps and step % 5 == 4:
                error = sum(
                    share * made.error(made.forward(parameters, x), y).mean(-1)
                    for share, x, y in tests
                )
                assert isinstance(error, torch.Tensor), "there are tests"
                errors.append(torch.nan_to_num(error, WORST, WORST, WORST).clamp(max=WORST))
    return torch.stack(errors).mean(0).view(n, seeds).numpy()


def main() -> None:
    """Runs the tasks and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--grid", default="candidates", choices=sorted(GRIDS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", default="abc")
    parser.add_argument("--details", action="store_true", help="one row for each task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [t for t in TASKS if not options.tasks or t.name in options.tasks]
    tasks = [t for t in tasks if t.group in options.groups]
    variants = [Variant("nothing", {}), *GRIDS[options.grid]]
    errors, start = {}, time.monotonic()
    for task in tasks:
        errors[task.name] = train(task, variants, options.seeds)
    print_tables(tasks, variants, errors, details=options.details)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
