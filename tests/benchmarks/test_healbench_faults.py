"""healbench's faults early, in the middle and late: what they change, and that they recur."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn.utils import get_total_norm

from benchmarks.healbench import summary
from benchmarks.healbench.jax_tasks import ARMS
from benchmarks.healbench.jax_tasks import TASKS as JAX
from benchmarks.healbench.jax_tasks.problem import with_numbers
from benchmarks.healbench.problem import MAIN
from benchmarks.healbench.tasks import TASKS, gradient_faults, shifted_labels, wrong_numbers
from benchmarks.healbench.tasks.short_runs import CLASSES, MAX_NORM, PLACES
from benchmarks.healbench.training import Training

NUMBERS, GRADIENTS, LABELS = (
    [name for name, task in TASKS.items() if task.family == module.FAMILY]
    for module in (wrong_numbers, gradient_faults, shifted_labels)
)


def first_step(name: str) -> int:
    return PLACES[name.rpartition("_")[2]]


class Watched(Training):
    """Takes no step, so that the weights stay, and keeps the gradients that the optimizer gets."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.seen: dict[str, torch.Tensor] = {}
        problem.schedulers.clear()  # a scheduler warns of steps that are not taken

    def admit(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> bool:
        for name, weight in self.problem.modules["model"].named_parameters():
            assert weight.grad is not None
            self.seen[name] = weight.grad.clone()
        return False


def gradients_at(problem: Any, step: int) -> dict[str, torch.Tensor]:
    """The gradients that the optimizer gets at a step, with the present weights."""
    run = Watched(problem)
    problem.step(problem.batches[step], run.update)
    return run.seen


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(get_total_norm(gradients.values()))


def test_each_kind_has_faults_early_in_the_middle_and_late_in_both_frameworks():
    for names in (NUMBERS, GRADIENTS, LABELS):
        assert {first_step(name) for name in names} == set(PLACES.values())
        assert {TASKS[name].family for name in names} <= summary.FAMILIES.keys()
        assert JAX.keys() & set(names)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_wrong_for_some_steps_from_its_place_on(name):
    problem: Any = TASKS[name].build(0)
    (number,) = problem.numbers(0)
    right = problem.optimizers[MAIN].defaults[number]
    wrong = [i for i in range(len(problem.batches)) if problem.numbers(i)[number] != right]
    first = first_step(name)
    assert wrong == [*range(first, first + len(wrong))]
    assert 20 <= len(wrong) <= 100


def test_the_program_sets_the_number_before_the_step_by_the_number_of_the_batch():
    problem: Any = TASKS["swapped_betas_late"].build(0)
    run = Training(problem)
    betas = []
    for step in (0, first_step("swapped_betas_late"), 0):  # as after a rollback
        problem.step(problem.batches[step], run.update)
        betas.append(problem.optimizers[MAIN].param_groups[0]["betas"])
    assert betas == [(0.9, 0.999), (0.999, 0.9), (0.9, 0.999)]


@pytest.mark.parametrize("name", [name for name in GRADIENTS if "clip" not in name])
def test_gradients_are_changed_at_some_steps_and_a_repeat_changes_them_the_same(name):
    problem, healthy = TASKS[name].build(0), TASKS[TASKS[name].reference].build(0)
    first = first_step(name)
    for step in (first - 1, first + 20):
        ours, theirs = gradients_at(problem, step), gradients_at(healthy, step)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    ours, theirs = gradients_at(problem, first), gradients_at(healthy, first)
    again = gradients_at(problem, first)
    assert all(torch.equal(ours[key], again[key]) for key in theirs)
    if name.startswith("unscaled"):
        assert all(torch.equal(ours[key], 4096 * theirs[key]) for key in theirs)
    else:
        assert 0.9 < norm(ours) / sum(each.numel() for each in ours.values()) ** 0.5 < 1.1


def test_a_clip_is_forgotten_from_its_place_on():
    name = "clip_forgotten_middle"
    problem, healthy = TASKS[name].build(0), TASKS[TASKS[name].reference].build(0)
    targets = [float(batch[1][1].abs().max()) for batch in problem.batches]
    huge = [step for step, largest in enumerate(targets) if largest > 50]
    assert 0.03 < len(huge) / len(targets) < 0.1
    before = [step for step in huge if step < first_step(name)][-1]
    after = next(step for step in huge if step >= first_step(name))
    assert norm(gradients_at(problem, before)) == pytest.approx(MAX_NORM, rel=1e-3)
    assert norm(gradients_at(problem, after)) > 10
    assert norm(gradients_at(healthy, after)) == pytest.approx(MAX_NORM, rel=1e-3)


@pytest.mark.parametrize("name", LABELS)
def test_labels_are_one_class_too_high_in_30_batches(name):
    problem, healthy = TASKS[name].build(0), TASKS[TASKS[name].reference].build(0)
    moved = [
        set(((ours[1] - theirs[1]) % CLASSES).tolist())
        for ours, theirs in zip(problem.batches, healthy.batches, strict=True)
    ]
    first = first_step(name)
    assert [step for step, by in enumerate(moved) if by != {0}] == [*range(first, first + 30)]
    assert all(by == {1} for by in moved[first : first + 30])


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["nothing", "attach_default"])
def test_numbers_reach_the_state_of_optax_under_any_arm(arm):
    problem: Any = JAX["swapped_betas_early"].build(0)
    first = first_step("swapped_betas_early")
    state = problem.start(ARMS[arm](problem).tx)
    for step, betas in ((first - 1, (0.9, 0.999)), (first, (0.999, 0.9)), (0, (0.9, 0.999))):
        state = problem.set_numbers(state, problem.batches[step])
        found = [float(optax.tree.get(state.opt_state, name)) for name in ("b1", "b2")]
        assert found == pytest.approx(betas)
    left = [float(optax.tree.get(state.opt_state, name)) for name in ("eps", "weight_decay")]
    assert left == pytest.approx([1e-8, 0.01])


def test_the_number_in_the_state_of_optax_is_that_of_the_step():
    optimizer = optax.inject_hyperparams(optax.sgd)(1.0, momentum=0.5)
    ones = jnp.ones(3)
    _, state = optimizer.update(ones, optimizer.init(ones))
    for momentum in (0.5, 0.25):
        updates: Any = optimizer.update(ones, with_numbers(state, {"momentum": momentum}))[0]
        np.testing.assert_allclose(updates, -(1 + momentum))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in GRADIENTS if name in JAX and "garbage" not in name]
)
def test_jax_changes_the_gradients_as_torch_does(name):
    problem: Any = JAX[name].build(0)
    gradient = jax.jit(jax.grad(problem.loss, has_aux=True))
    for step in (0, first_step(name)):
        batch = problem.batches[step]
        ours = problem.gradients(gradient(problem.params, batch)[0], batch)
        theirs = gradients_at(TASKS[name].build(0), step)
        for key, wanted in theirs.items():
            tolerance = 1e-4 * float(wanted.abs().max())
            np.testing.assert_allclose(ours[key], wanted, atol=tolerance, err_msg=key)


@pytest.mark.slow
def test_jax_garbage_is_the_same_when_a_step_is_repeated():
    problem: Any = JAX["garbage_gradients_middle"].build(0)
    first = first_step("garbage_gradients_middle")
    zeros = jax.tree.map(jnp.zeros_like, problem.params)
    garbage = [problem.gradients(zeros, (step, None)) for step in (first, first, first + 1, 0)]
    flat = [np.concatenate([np.ravel(each) for each in g.values()]) for g in garbage]
    assert flat[0].std() == pytest.approx(1.0, abs=0.05)
    assert (flat[0] == flat[1]).all()
    assert not np.isclose(flat[0], flat[2]).any()
    assert not flat[3].any()


def test_the_kinds_of_faults_are_columns_of_the_summary():
    assert all(cell in next(summary.promise([])) for cell in summary.FAMILIES.values())
    assert {task.family for task in TASKS.values() if task.kind == "faulty"} == {*summary.FAMILIES}
