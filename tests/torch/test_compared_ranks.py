"""With a `loss_fn` several ranks decide as one does."""

import math
from typing import Any

import pytest

from tests.torch import compared_ranks
from tests.torch.compared_ranks import FAULT, FAULTS, STEPS
from tests.torch.forked_ranks import Worlds, worlds_of

FAST, SLOW, FOUR = ("DDP",), ("FSDP2", "tensor parallel", "accumulated"), ("FSDP2",)
SPREAD = [
    (2, FAST, "DDP"),
    *(pytest.param(2, SLOW, kind, marks=pytest.mark.slow) for kind in SLOW),
    pytest.param(4, FOUR, "FSDP2", marks=pytest.mark.slow),
]
TOLERANCE = {"earlier": 1e-5, "damage": 1e-2, "healthy": 1e-5}
"""Relative, of losses: several processes add up in another order than one. Damaged weights multiply
the difference, from 1e-7 to 4e-3 within 30 steps. At 100 times the rate training is chaotic: those
current weights differ."""


worlds = worlds_of("tests.torch.compared_ranks", compared_ranks.SECONDS)


def cases(*kinds: str) -> list[str]:
    found = [f"{kind}, {fault}" for kind in kinds for fault in FAULTS]
    return [*found, "DDP, raises"] if kinds == FAST else found


def alone(worlds: Worlds, fault: str) -> Any:
    [found] = worlds.of(1, cases("alone"), f"alone, {fault}")
    return found


def goes_back_from_faults_only(fault: str, found: dict[str, Any]) -> None:
    """What one rank, or one device, does."""
    checkpoints = [each["checkpoint"] for each in found["rollbacks"]]
    assert checkpoints in ([[]] if fault == "healthy" else ([40], [60])), "before the fault"
    if fault == "healthy":
        assert sum(each["steps"][0] >= FAULT for each in found["compared"]) > 3
    else:
        assert (found["rollbacks"][0]["lr_limit"] is None) == (fault == "damage")
        assert found["lr_scale"] == pytest.approx(0.01 if fault == "rate" else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("world", "kinds", "kind"), SPREAD)
def test_several_ranks_decide_as_one(
    world: int, kinds: tuple[str, ...], kind: str, fault: str, worlds: Worlds
):
    one = alone(worlds, fault)
    goes_back_from_faults_only(fault, one)
    outcomes = worlds.of(world, cases(*kinds), f"{kind}, {fault}")

    # All ranks have one outcome.
    assert len(outcomes) == world
    found = outcomes[0]
    assert all(each == found for each in outcomes)  # to the bit

    # It has the rollbacks of one process. A rate that is too high makes the steps chaotic.
    assert len(found["rollbacks"]) == len(one["rollbacks"])
    for mine, expected in zip(found["rollbacks"], one["rollbacks"], strict=True):
        chaotic = {"step": 0, "checkpoint": 0} if fault == "rate" else {}
        assert {**mine, **chaotic} == {**expected, **chaotic}
        assert abs(mine["step"] - expected["step"]) <= (20 if fault == "rate" else 0)
    assert found["lr_scale"] == one["lr_scale"]
    assert found["norm"] == pytest.approx(one["norm"], rel=1e-4)

    # The same steps were compared, with the same losses.
    pairs = zip(found["compared"], one["compared"], strict=fault in TOLERANCE)
    same_until = FAULT + 10 if fault == "rate" else math.inf
    for mine, expected in pairs:
        if expected["steps"][0] >= same_until:
            break
        assert mine["steps"] == expected["steps"]
        assert mine["anchor"] == expected["anchor"]
        assert mine["then"] == pytest.approx(expected["then"], rel=TOLERANCE["earlier"])
        if fault in TOLERANCE:
            near = pytest.approx(expected["now"], rel=TOLERANCE[fault], nan_ok=True)
            assert mine["now"] == near


def test_a_loss_fn_that_raises_on_one_rank_is_not_called_again_on_any(worlds: Worlds):
    first, second = worlds.of(2, cases(*FAST), "DDP, raises")
    assert first["steps"] == STEPS
    assert FAULT < first["compared at"] < STEPS - 5
    (problem,) = first["problems"]
    assert "no such row" in problem
    assert first == {**second, "problems": [problem], "compared": first["compared"]}
