"""Two ranks of which one sees something bad decide the same: replicas stay the same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch.ddp_rank import BAD, SCENARIOS, SECONDS, STEPS

REPOSITORY = Path(__file__).parents[2]


class Pair:
    """What both ranks have said, scenario by scenario."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "tests.torch.ddp_rank"]
        running = [
            subprocess.Popen(
                [*command, str(rank), root],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        try:
            self._ends = [each.communicate(timeout=SECONDS * len(SCENARIOS)) for each in running]
        finally:
            for process in running:
                process.kill()

    def said(self, scenario: str) -> list[dict[str, Any]]:
        """By each rank."""
        told = []
        for out, errors in self._ends:
            lines = dict(zip(SCENARIOS, out.splitlines(), strict=False))
            assert scenario in lines, errors[-3000:]
            told.append(json.loads(lines[scenario]))
        return told

    def agreed(self, scenario: str) -> dict[str, Any]:
        """By both."""
        first, second = self.said(scenario)
        assert first == second
        assert first["raised"] is None
        assert first["finite"]
        return first


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("ranks"))


host_and_device = pytest.mark.parametrize("where", ["host", "device"])


@host_and_device
@pytest.mark.parametrize("what", ["NaN loss", "loss spike", "NaN gradient", "Healer"])
def test_what_one_rank_sees_both_skip(what: str, where: str, pair: Pair):
    assert pair.agreed(f"{what}, {where}")["skips"] == 1


@host_and_device
def test_per_tensor_clipping_agrees(where: str, pair: Pair):
    pair.agreed(f"per-tensor clipping, {where}")


@host_and_device
def test_it_costs_one_all_reduce_a_step(where: str, pair: Pair):
    told = pair.agreed(f"NaN loss, {where}")
    assert told["collectives"] == STEPS
    assert "2 decide together, by one all_reduce per step" in told["report"]
    alone = pair.said("nothing is exchanged")[0]
    assert alone["collectives"] == 0
    assert "all_reduce" not in alone["report"]


@host_and_device
def test_gradients_that_are_not_reduced_are_skipped_and_scaled_alike(where: str, pair: Pair):
    for what, skips in (("local NaN gradient", 1), ("local gradients clipped", 0)):
        first, second = pair.said(f"{what}, {where}")
        assert first["skips"] == second["skips"] == skips
        assert first["grad_scale"] == second["grad_scale"]
        assert first["finite"]
        assert second["finite"]


@host_and_device
def test_a_rank_without_gradients_does_not_keep_the_other_waiting(where: str, pair: Pair):
    for told in pair.said(f"no gradient on one rank, {where}"):
        assert told["raised"] is None
        assert told["collectives"] == STEPS


@host_and_device
def test_one_rank_may_ask_for_the_state_of_a_fresh_optimizer(where: str, pair: Pair):
    for told in pair.said(f"fresh state on one rank, {where}"):
        assert told["raised"] is None
        assert told["collectives"] == STEPS


@host_and_device
def test_decisions_that_differ_all_the_same_are_an_error(where: str, pair: Pair):
    for told in pair.said(f"change expected on one rank, {where}"):
        assert told["raised"].startswith(f"{BAD + 1}: "), told
        assert "expect_change" in told["raised"]


def test_a_healer_whose_engines_exchange_nothing_raises_instead_of_waiting(pair: Pair):
    for told in pair.said("nothing is exchanged, Healer"):
        assert "process_group" in told["raised"]
