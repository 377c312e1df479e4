"""A rank that runs out of memory: all do the step again in smaller parts, and none waits."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.torch.driver.out_of_memory_ranks import BATCH, SECONDS, STEPS, WORLD
from tests.torch.forked_ranks import Worlds, worlds_of

pytestmark = pytest.mark.slow  # several processes

HALF = BATCH // 2
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


def same_weights(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for each in found:
        assert not each["raised"]
        assert each["weights"] == found[0]["weights"], "bit for bit"
        for a, b in zip(each["weights"], expected[0]["weights"], strict=True):
            assert a == pytest.approx(b, rel=EXACT, abs=EXACT)


def alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same run, and one model on all ranks."""
    same_weights(found, expected)
    for one, other in zip(found, expected, strict=True):
        assert one["sizes"] == other["sizes"]
        for a, b in zip(one["buffers"], other["buffers"], strict=True):
            assert a == pytest.approx(b, rel=EXACT, abs=EXACT)
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert one["draws"] == other["draws"], "random states"


def test_one_rank_fails_anywhere(of: Of):
    """The result equals a run that was split on all ranks from the start of that step."""
    names = [name for name in of("cases")[0] if name.startswith("rank 1 at ")]
    steps = set()
    for name in names:
        found = of(name)
        step = next(i for i, sizes in enumerate(found[0]["sizes"]) if sizes[0] == HALF)
        steps.add(step)
        alike(found, of(f"from {step}"))
        ((at, problem),) = found[0]["faults"]
        assert at == step
        assert problem.startswith(f"rank 1: a part of {BATCH} samples does not fit")
    assert steps == set(range(STEPS))


@pytest.mark.parametrize(
    ("name", "expected", "problems"),
    [
        ("two ranks", "from 0", ["rank 0, 2: "]),
        ("two ranks, later", f"from {STEPS - 1}", ["rank 0, 2: "]),
        ("again", "quarters", ["rank 1: ", "rank 2: "]),
    ],
)
def test_another_rank_fails_too(of: Of, name: str, expected: str, problems: list[str]):
    """At another operation, or while the step is done again."""
    found = of(name)
    alike(found, of(expected))
    said = [problem for _, problem in found[0]["faults"]]
    assert [line[: line.index(":") + 2] for line in said] == problems


@pytest.mark.parametrize(
    ("name", "expected", "sizes"),
    [
        ("many buckets", "plain", None),
        ("no_sync, inner module", "plain", None),
        ("by hand", "plain", [[2] * 4] * 3),
        ("uneven, limited", "uneven", [[3, 3], [2, 3, 3, 3], [2] * 8]),
    ],
)
def test_gradients_are_those_of_whole_batches(of: Of, name: str, expected: str, sizes: Any):
    """Also where the loop reduces by hand, and with batches of other sizes on each rank."""
    found = of(name)
    same_weights(found, of(expected))
    assert len(found[0]["faults"]) == 2
    assert sizes is None or [each["sizes"][0] for each in found] == [each * 2 for each in sizes]


def test_all_ranks_try_larger_parts_in_the_same_step(of: Of):
    """If the larger part does not fit on one rank, all ranks repeat the step in small parts."""
    alike(of("larger again"), of("whole later"))
    assert of("larger again")[0]["faults"] == []
    failed = of("larger on rank 1 alone")
    alike(failed, of("from 0"))
    ((step, problem),) = failed[0]["faults"]
    assert step == 1
    assert problem.startswith(f"rank 1: a part of {BATCH} samples does not fit into memory")


@pytest.mark.parametrize(
    ("name", "said"),
    [("one sample", "activation checkpointing"), ("static graph", "static_graph=True")],
)
def test_what_does_not_fit_stops_all_ranks(of: Of, name: str, said: str):
    for each in of(name):
        assert said in each["raised"]["said"]
        assert each["raised"]["type"] == "RunStopped" or name != "one sample"


def test_sharded_parameters_end_the_run(worlds: Worlds):
    waits, failed = (each["sharded"]["raised"] for each in worlds.of(2, ["0"], "0"))
    assert failed["type"] == "OutOfMemoryError"
    assert "the parameters are spread over the ranks" in failed["said"]
    assert waits["type"] == "RuntimeError"
