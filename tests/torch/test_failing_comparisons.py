"""A `loss_fn` that fails on one of two ranks, and ranks whose clocks differ: no rank waits."""

from __future__ import annotations

import pytest

from tests.torch.failing_comparisons import FAULT, SECONDS, STEPS, WAIT_S
from tests.torch.worlds import Worlds

TOGETHER = ("clock", "raises", "wrong")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder = tmp_path_factory.mktemp("worlds")
    return Worlds("tests.torch.failing_comparisons", folder, seconds=SECONDS + 30)


def test_a_clock_that_stands_still_on_one_rank_keeps_nobody_waiting(worlds: Worlds):
    first, second = worlds.of(2, TOGETHER, "clock")
    assert first["steps"] == second["steps"] == STEPS
    assert first["calls"] == second["calls"] > 10
    assert first["weights"] == second["weights"]


def test_a_loss_fn_that_raises_on_one_rank_is_not_called_again_on_any(worlds: Worlds):
    outcomes = worlds.of(2, TOGETHER, "raises")
    for each in outcomes:
        assert (each["steps"], each["said"]) == (STEPS, "")
        assert FAULT < each["asked at"] == outcomes[0]["asked at"] < STEPS - 5
        assert each["problems"] == [
            "loss_fn raised ValueError: no such row; it is not called again"
        ]
        assert each["weights"] == outcomes[0]["weights"]


def test_a_wrong_loss_fn_of_one_rank_is_an_error_on_all_at_the_first_step(worlds: Worlds):
    for each in worlds.of(2, TOGETHER, "wrong"):
        assert "one number, got shape (2,)" in each["said"]
        assert each["steps"] < 5


def test_a_rank_that_raises_while_others_gather_parameters_ends_the_run(worlds: Worlds):
    first, second = worlds.of(2, ("gathered",), "gathered")
    assert second["said"] == "ValueError: no such row"
    assert "Connection closed" in first["said"]
    assert max(first["took"], second["took"]) < WAIT_S + 40
