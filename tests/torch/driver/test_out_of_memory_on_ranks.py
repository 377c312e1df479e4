"""A rank that runs out of memory: all do the step again in smaller parts, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.torch.driver.out_of_memory_ranks import BATCH, SECONDS, STEPS, WORLD
from tests.torch.worlds import Worlds, worlds_of

HALF, QUARTER = BATCH // 2, BATCH // 4
EXACT = 1e-12
"""Relative, float64: three ranks may be added up in another order."""


Of = Callable[[str], list[dict[str, Any]]]
"""Takes the name of a case; returns its outcome on each rank."""

worlds = worlds_of("tests.torch.driver.out_of_memory_ranks", SECONDS)


@pytest.fixture(
    scope="module", params=[61, pytest.param(1, marks=pytest.mark.stress)], ids=["some", "all"]
)
def of(request, worlds: Worlds) -> Of:
    found = worlds.of(WORLD, [str(request.param)], str(request.param))
    return lambda case: [each[case] for each in found]


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


def test_one_rank_fails_anywhere(of: Of):
    """The result equals a run that was split on all ranks from the start of that step.

    With dropout, batch statistics and accumulation.
    """
    names = [name for name in of("cases")[0] if name.startswith("rank 1 at ")]
    steps = set()
    for name in names:
        found = of(name)
        step = next(i for i, sizes in enumerate(found[0]["sizes"]) if sizes[0] == HALF)
        steps.add(step)
        alike(found, of(f"from {step}"))
        ((at, problem),) = found[0]["faults"]
        assert at == step
        assert problem.startswith(f"rank 1: {BATCH} of {BATCH} samples do not fit")
    assert steps == set(range(STEPS))


@pytest.mark.parametrize(("name", "step"), [("two ranks", 0), ("two ranks, later", STEPS - 1)])
def test_two_ranks_fail_at_different_operations(of: Of, name: str, step: int):
    found = of(name)
    alike(found, of(f"from {step}"))
    ((_, problem),) = found[0]["faults"]
    assert problem.startswith("rank 0, 2: ")


def test_another_rank_fails_while_the_step_is_done_again(of: Of):
    found = of("again")
    alike(found, of("quarters"))
    assert [problem[:8] for _, problem in found[0]["faults"]] == ["rank 1: ", "rank 2: "]


@pytest.mark.parametrize("name", ["many buckets", "no_sync, inner module"])
def test_gradients_are_those_of_whole_batches(of: Of, name: str):
    found, expected = of(name), of("plain")
    assert len(found[0]["faults"]) == 2
    same_weights(found, expected)


def same_weights(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for each in found:
        assert not each.get("raised")
        assert each["weights"] == found[0]["weights"]
        for a, b in zip(each["weights"], expected[0]["weights"], strict=True):
            assert a == pytest.approx(b, rel=1e-6, abs=1e-12)


def test_a_loop_that_reduces_by_hand(of: Of):
    same_weights(of("by hand"), of("loop"))
    assert all(each["sizes"] == [[2] * 4] * 4 for each in of("by hand"))


def test_ranks_with_batches_of_other_sizes_have_other_numbers_of_parts(of: Of):
    found = of("uneven, limited")
    same_weights(found, of("uneven"))
    assert [each["sizes"][0] for each in found] == [[3, 3], [2, 3, 3, 3], [2] * 8]


def test_a_single_sample_that_does_not_fit_stops_all_ranks(of: Of):
    for each in of("one sample"):
        assert each["raised"]["type"] == "RunStopped"
        assert "activation checkpointing" in each["raised"]["said"]


def test_a_static_graph_is_refused(of: Of):
    for each in of("static graph"):
        assert "static_graph=True" in each["raised"]["said"]


def test_sharded_parameters_end_the_run(worlds: Worlds):
    waits, failed = (each["sharded"]["raised"] for each in worlds.of(2, ["0"], "0"))
    assert failed["type"] == "OutOfMemoryError"
    assert "the parameters are spread over the ranks" in failed["said"]
    assert waits["type"] == "RuntimeError"
