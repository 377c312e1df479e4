"""healbench's tasks: accumulated steps, edits and faults in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.healbench.arms import ARMS
from benchmarks.healbench.problem import MAIN, Problem
from benchmarks.healbench.tasks import TASKS
from benchmarks.healbench.tasks.middle_faults import STEPS


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """One thread, as in the workers: with more, small models wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(task: str, arm: str, steps: slice) -> Any:
    problem = TASKS[task].build(0)
    problem.batches = problem.batches[steps]
    with ARMS[arm](problem) as run:
        run.train()
    return run


def weights(problem: Problem) -> Tensor:
    return torch.cat([w.detach().flatten() for w in problem.modules["model"].parameters()])


def test_four_micro_batches_are_one_step_on_the_whole_batch():
    run = trained("accumulated", "nothing", slice(0, 8))
    other = TASKS["accumulated"].build(0)
    data: Any = other.batches
    model, optimizer = other.modules["model"], other.optimizers[MAIN]
    for first in (0, 4):
        x, y = (torch.cat([pair[k] for _, pair in data[first : first + 4]]) for k in (0, 1))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        other.schedulers[MAIN].step()
    torch.testing.assert_close(weights(run.problem), weights(other), rtol=1e-4, atol=1e-5)


def test_a_fault_in_the_middle_leaves_the_first_half_as_it_was():
    faults = [n for n, t in TASKS.items() if t.reference == "small_transformer"]
    half = weights(trained("small_transformer", "nothing", slice(0, 12)).problem)
    late = [name for name in faults if not name.startswith("start_")]
    assert len(faults) - len(late) == 3
    for name in late:
        healthy, sick = (TASKS[each].build(0) for each in ("small_transformer", name))
        middle = STEPS // 2
        for i in (0, middle - 1):
            assert torch.equal(sick.batches[i], healthy.batches[i]), name
        rates = [problem.schedulers[MAIN] for problem in (healthy, sick)]
        factors = [[r.lr_lambdas[0](i) for i in range(middle + 2)] for r in rates]  # type: ignore
        assert factors[0][:middle] == factors[1][:middle], name
        if name.startswith("shard_"):
            assert not torch.equal(sick.batches[middle], healthy.batches[middle])
            after = middle + int(name.removeprefix("shard_"))
            assert torch.equal(sick.batches[after], healthy.batches[after])
    assert torch.equal(half, weights(trained("layer_50x", "nothing", slice(0, 12)).problem))
