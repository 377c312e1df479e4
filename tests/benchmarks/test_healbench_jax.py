"""healbench's tasks in JAX and in torch: the same programs, faults in the middle, and the arms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from benchmarks.healbench import running, training
from benchmarks.healbench.jax_tasks import ARMS, TASKS
from benchmarks.healbench.jax_tasks.problem import running as running_stats
from benchmarks.healbench.problem import MAIN
from benchmarks.healbench.tasks import TASKS as TORCH
from benchmarks.healbench.tasks import wrong_numbers
from benchmarks.healbench.tasks.middle_faults import STEPS

pytestmark = pytest.mark.slow  # about our own benchmark


def build(task: str) -> Any:
    return TASKS[task].build(0)


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for name, array in ours.items():
        wanted = np.asarray(theirs[name])
        np.testing.assert_allclose(array, wanted, atol=tolerance * abs(wanted).max(), err_msg=name)


def test_the_suite_is_part_of_the_one_in_torch():
    there = running.suite("jax")
    assert there.tasks == TASKS
    assert there.arms.keys() <= running.suite("torch").arms.keys()
    for name, task in TASKS.items():
        twin = TORCH[name]
        for part in ("kind", "metric", "reference", "family"):
            assert getattr(task, part) == getattr(twin, part)
        assert not task.reference or task.reference in TASKS
    kinds = [task.kind for task in TASKS.values()]
    assert (kinds.count("healthy"), kinds.count("faulty")) >= (15, 8)


@functools.cache
def graded(loss: Any) -> Any:
    """Compiled once for all tasks with the same loss and shapes."""
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("name", [*TASKS][::2])
def test_gradients_and_optimizer_are_those_of_the_torch_task(name):
    problem = build(name)
    source = TORCH[name].build(0)
    assert len(problem.batches) == len(source.batches)
    (loss, seen), grads = graded(problem.loss)(problem.params, problem.batches[0])
    assert jnp.isfinite(loss)
    if problem.gradients is not None:
        grads = problem.gradients(grads, problem.batches[0])
    weights = dict(source.modules["model"].named_parameters())
    # Optimizers work element by element: one tensor of its own is enough.
    one = min((name for name in weights if name.endswith("bias")), key=lambda n: len(weights[n]))
    ours: Any = {one: problem.params[one]}
    opt_state = problem.optimizer.init(ours)
    loop = training.Training(source)
    for i in range(3):
        source.step(source.batches[i], loop.update)
        theirs = {key: each.grad for key, each in weights.items()}
        if i == 0:
            close(grads, theirs, 1e-4)
            buffers = dict(source.modules["model"].named_buffers())
            close(running_stats(problem.stats, seen), buffers, 1e-5)
        given = {one: jnp.asarray(np.asarray(theirs[one]))}
        updates, opt_state = problem.optimizer.update(given, opt_state, ours)
        ours = optax.apply_updates(ours, updates)
    close(ours, {one: weights[one].detach()}, 1e-5)


@pytest.mark.parametrize("arm", ["nothing", "attach_default"])
def test_damage_reaches_the_moments_under_any_arm(arm):
    problem = build("bit_flip_moment")
    state = problem.start(ARMS[arm](problem).tx)
    ones = jax.tree.map(jnp.ones_like, optax.tree.get(state.opt_state, "nu"))
    state = state._replace(opt_state=optax.tree.set(state.opt_state, nu=ones))
    flipped = optax.tree.get(problem.damage.change(state).opt_state, "nu")
    zero = {name for name, each in flipped.items() if not each.any()}
    assert zero == {"blocks.1.mlp.0.weight"}
    left = optax.tree.get(build("poisoned_resume").damage.change(state).opt_state, "nu")
    assert all(float(each.max()) == pytest.approx(1e-12) for each in left.values())


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """One thread, as in the workers: with more, small models wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_fault_in_the_middle_leaves_the_first_half_as_it_was():
    faults = [
        name
        for name, task in TORCH.items()
        if task.reference == "small_transformer" and task.family != wrong_numbers.FAMILY
    ]
    late = [name for name in faults if not name.startswith("start_")]
    assert len(faults) - len(late) == 3
    healthy: Any = TORCH["small_transformer"].build(0)
    for name in late:
        faulty: Any = TORCH[name].build(0)
        middle = STEPS // 2
        same = [0, middle - 1]
        if name.startswith("shard_"):
            assert not torch.equal(faulty.batches[middle], healthy.batches[middle])
            same.append(middle + int(name.removeprefix("shard_")))
        assert all(torch.equal(faulty.batches[i], healthy.batches[i]) for i in same), name
        rates = [problem.schedulers[MAIN].lr_lambdas[0] for problem in (healthy, faulty)]
        assert all(rates[0](i) == rates[1](i) for i in range(middle)), name
