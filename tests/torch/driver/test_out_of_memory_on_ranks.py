"""A rank that runs out of memory: all do the step again in smaller parts, and none waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch.driver.out_of_memory_ranks import ACCUMULATED, BATCH, SECONDS, STEPS, WORLD
from tests.torch.forked_ranks import run_ranks

HALF, QUARTER = BATCH // 2, BATCH // 4
EXACT = 1e-12
"""Relative, float64: three ranks may be added up in another order."""


class World:
    """What each rank wrote, case by case."""

    def __init__(self, root: Path, every: int) -> None:
        module = "tests.torch.driver.out_of_memory_ranks"
        found = run_ranks(module, root, str(every), world=WORLD, seconds=SECONDS + 30)
        self.errors = "\n".join(errors[-3000:] for _, errors in found)
        self.cases = [dict(map(json.loads, out.splitlines())) for out, _ in found]

    def of(self, case: str) -> list[dict[str, Any]]:
        """The outcome on each rank."""
        assert all(case in each for each in self.cases), self.errors
        return [each[case] for each in self.cases]


@pytest.fixture(
    scope="module", params=[41, pytest.param(1, marks=pytest.mark.stress)], ids=["some", "all"]
)
def world(request, tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"), request.param)


def alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same run, and one model on all ranks."""
    for one, other in zip(found, expected, strict=True):
        assert one["weights"] == found[0]["weights"], "bit for bit"
        assert one["sizes"] == other["sizes"]
        for name in ("weights", "buffers"):
            for a, b in zip(one[name], other[name], strict=True):
                assert a == pytest.approx(b, rel=EXACT, abs=EXACT)
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert one["draws"] == other["draws"], "random states"


def test_one_rank_fails_anywhere(world: World):
    """Everything is that of a run that was split on all ranks from the beginning of that step.

    With dropout, batch statistics and accumulation, before and after gradients are reduced within
    backward passes.
    """
    names = [name for name in world.cases[0] if name.startswith("rank 1 at ")]
    steps = set()
    for name in names:
        found = world.of(name)
        step = next(i for i, sizes in enumerate(found[0]["sizes"]) if sizes[0] == HALF)
        steps.add(step)
        alike(found, world.of(f"from {step}"))
        ((at, problem),) = found[0]["faults"]
        assert at == step
        assert problem.startswith(f"rank 1: {BATCH} of {BATCH} samples do not fit")
    assert steps == set(range(STEPS))


@pytest.mark.parametrize(("name", "step"), [("two ranks", 0), ("two ranks, later", STEPS - 1)])
def test_two_ranks_fail_at_different_operations(world: World, name: str, step: int):
    found = world.of(name)
    alike(found, world.of(f"from {step}"))
    ((_, problem),) = found[0]["faults"]
    assert problem.startswith("rank 0, 2: ")


def test_another_rank_fails_while_the_step_is_done_again(world: World):
    found = world.of("again")
    alike(found, world.of("quarters"))
    assert [problem[:8] for _, problem in found[0]["faults"]] == ["rank 1: ", "rank 2: "]


@pytest.mark.parametrize(
    "name", ["gradient_as_bucket_view", "many buckets", "no_sync", "inner module", "compressed"]
)
def test_gradients_are_those_of_whole_batches(world: World, name: str):
    found, expected = world.of(name), world.of("plain")
    assert len(found[0]["faults"]) == 2
    for each in found:
        assert each["weights"] == found[0]["weights"]
        for a, b in zip(each["weights"], expected[0]["weights"], strict=True):
            # Two roundings to float16 are not those of one.
            assert a == pytest.approx(b, rel=1e-6, abs=1e-4 if name == "compressed" else 1e-12)


def test_parameters_that_some_ranks_do_not_use(world: World):
    found, expected = world.of("unused"), world.of("all of it")
    assert len(found[0]["faults"]) == 2
    for each in found:
        assert each["weights"] == found[0]["weights"]
        for a, b in zip(each["weights"], expected[0]["weights"], strict=True):
            assert a == pytest.approx(b, rel=1e-6)


def test_nothing_fails(world: World):
    for each in world.of("whole"):
        assert each["sizes"] == [[BATCH] * ACCUMULATED] * STEPS
        assert each["faults"] == []
