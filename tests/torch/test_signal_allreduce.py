"""Two ranks, one with a bad batch, decide the same; their replicas stay bitwise equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch.ddp_rank import BAD, SCENARIOS, SECONDS, STEPS
from tests.torch.forked_ranks import run_ranks
from tests.torch.optimizer_cases import host_and_device


class Pair:
    """The output of both ranks, scenario by scenario."""

    def __init__(self, root: Path) -> None:
        self._outputs = run_ranks("tests.torch.ddp_rank", root, seconds=SECONDS * len(SCENARIOS))

    def outputs(self, scenario: str) -> list[dict[str, Any]]:
        """The results of each rank."""
        found = []
        for out, errors in self._outputs:
            lines = dict(zip(SCENARIOS, out.splitlines(), strict=False))
            assert scenario in lines, errors[-3000:]
            found.append(json.loads(lines[scenario]))
        return found

    def agreed(self, scenario: str) -> dict[str, Any]:
        """The result, which must be the same on both ranks."""
        first, second = self.outputs(scenario)
        assert first == second
        assert first["raised"] is None
        assert first["finite"]
        return first


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("ranks"))


@host_and_device
@pytest.mark.parametrize("what", ["NaN loss", "loss spike", "NaN gradient", "Healer"])
def test_both_ranks_skip_what_is_bad_on_one(what: str, where: str, pair: Pair):
    assert pair.agreed(f"{what}, {where}")["skips"] == 1


@host_and_device
def test_per_tensor_clipping_agrees(where: str, pair: Pair):
    pair.agreed(f"per-tensor clipping, {where}")


@host_and_device
def test_it_costs_one_all_reduce_a_step(where: str, pair: Pair):
    found = pair.agreed(f"NaN loss, {where}")
    assert found["collectives"] == STEPS
    assert "2 decide together, by one all_reduce per step" in found["report"]
    alone = pair.outputs("nothing is exchanged")[0]
    assert alone["collectives"] == 0
    assert "all_reduce" not in alone["report"]


@host_and_device
def test_gradients_that_are_not_reduced_are_treated_the_same_on_both_ranks(where: str, pair: Pair):
    for what, skips in (("local NaN gradient", 1), ("local gradients clipped", 0)):
        first, second = pair.outputs(f"{what}, {where}")
        assert first["skips"] == second["skips"] == skips
        assert first["grad_scale"] == second["grad_scale"]
        assert first["finite"]
        assert second["finite"]


@host_and_device
def test_a_rank_without_gradients_does_not_keep_the_other_waiting(where: str, pair: Pair):
    for found in pair.outputs(f"no gradient on one rank, {where}"):
        assert found["raised"] is None
        assert found["collectives"] == STEPS


@host_and_device
def test_one_rank_may_initialize_the_state_of_a_fresh_optimizer(where: str, pair: Pair):
    for found in pair.outputs(f"fresh state on one rank, {where}"):
        assert found["raised"] is None
        assert found["collectives"] == STEPS


@host_and_device
def test_decisions_that_differ_are_an_error(where: str, pair: Pair):
    for found in pair.outputs(f"change expected on one rank, {where}"):
        assert found["raised"].startswith(f"{BAD + 1}: "), found
        assert "expect_change" in found["raised"]


def test_a_healer_whose_engines_exchange_nothing_raises_instead_of_waiting(pair: Pair):
    for found in pair.outputs("nothing is exchanged, Healer"):
        assert "process_group" in found["raised"]
