"""With a `loss_fn` several ranks decide as one does, and evaluate earlier weights in any layout."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.torch import compared_layouts, compared_ranks
from tests.torch.compared_layouts import KEPT, LAYOUTS
from tests.torch.compared_ranks import FAILING_FAULT, FAILING_STEPS, FAULT, FAULTS
from tests.torch.worlds import Worlds, worlds_of

FAST, SLOW = ("DDP", "FSDP2"), ("tensor parallel", "accumulated")
SPREAD = [
    *((2, FAST, kind) for kind in FAST),
    *(pytest.param(2, SLOW, kind, marks=pytest.mark.slow) for kind in SLOW),
    *(pytest.param(4, FAST, kind, marks=pytest.mark.slow) for kind in FAST),
]
TOLERANCE = {"earlier": 1e-5, "damage": 1e-2, "healthy": 1e-5}
"""Relative, of losses: several processes add up in another order than one. Damaged weights multiply
the difference, from 1e-7 to 4e-3 within 30 steps. At 100 times the rate training is chaotic: those
current weights differ."""


worlds = worlds_of("tests.torch.compared_ranks", compared_ranks.SECONDS)
layout_worlds = worlds_of("tests.torch.compared_layouts", compared_layouts.SECONDS)


def cases(*kinds: str) -> list[str]:
    return [f"{kind}, {fault}" for kind in kinds for fault in FAULTS]


def alone(worlds: Worlds, fault: str) -> Any:
    [found] = worlds.of(1, cases("alone"), f"alone, {fault}")
    return found


def test_one_rank_goes_back_from_faults_only(worlds: Worlds):
    damage, rate, healthy = (alone(worlds, fault) for fault in FAULTS)
    assert [each["checkpoint"] for each in damage["rollbacks"]] in ([40], [60])  # before the fault
    assert damage["rollbacks"][0]["lr_limit"] is None
    assert [each["checkpoint"] for each in rate["rollbacks"]] in ([40], [60])
    assert rate["lr_scale"] == pytest.approx(0.01)
    assert healthy["rollbacks"] == []
    assert sum(each["steps"][0] >= FAULT for each in healthy["compared"]) > 5


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("world", "kinds", "kind"), SPREAD)
def test_several_ranks_decide_as_one(
    world: int, kinds: tuple[str, ...], kind: str, fault: str, worlds: Worlds
):
    one = alone(worlds, fault)
    outcomes = worlds.of(world, cases(*kinds), f"{kind}, {fault}")
    assert len(outcomes) == world
    for each in outcomes:
        assert each == outcomes[0]  # to the bit
    found = outcomes[0]
    assert len(found["rollbacks"]) == len(one["rollbacks"])
    for mine, expected in zip(found["rollbacks"], one["rollbacks"], strict=True):
        chaotic = {"step": 0, "checkpoint": 0} if fault == "rate" else {}
        assert {**mine, **chaotic} == {**expected, **chaotic}
        assert abs(mine["step"] - expected["step"]) <= (20 if fault == "rate" else 0)
    assert found["lr_scale"] == one["lr_scale"]
    assert found["norm"] == pytest.approx(one["norm"], rel=1e-4)
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


# -- a `loss_fn` that fails on one of two ranks ----------------------------------------------------


def test_a_loss_fn_that_raises_on_one_rank_is_not_called_again_on_any(worlds: Worlds):
    outcomes = worlds.of(2, ["raises"], "raises")
    for each in outcomes:
        assert each["steps"] == FAILING_STEPS
        assert FAILING_FAULT < each["asked at"] == outcomes[0]["asked at"] < FAILING_STEPS - 5
        (problem,) = each["problems"]
        assert "no such row" in problem
        assert each["weights"] == outcomes[0]["weights"]


# -- earlier weights in each layout ----------------------------------------------------------------

FAST_LAYOUTS = ("DDP", "FSDP2", "FSDP2, bfloat16", "tensor parallel", "loss in parts")
SLOW_LAYOUTS = tuple(name for name in LAYOUTS[2] if name not in FAST_LAYOUTS)
EVALUATED = [
    *((2, FAST_LAYOUTS, name) for name in FAST_LAYOUTS),
    *(pytest.param(2, SLOW_LAYOUTS, name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS),
    *(pytest.param(4, tuple(LAYOUTS[4]), name, marks=pytest.mark.slow) for name in LAYOUTS[4]),
]


@pytest.mark.parametrize(("world", "layouts", "name"), EVALUATED)
def test_earlier_weights_have_their_loss_and_training_does_not_notice(
    world: int, layouts: tuple[str, ...], name: str, layout_worlds: Worlds
):
    for each in layout_worlds.of(world, layouts, name):
        then = each["with"]["losses"][KEPT]
        assert len(each["with"]["again"]) > 3
        for losses in each["with"]["again"]:
            assert losses == [then]  # to the bit: after each step, and twice in a row
        assert each["with"]["losses"] == each["without"]["losses"]
        assert each["with"]["digest"] == each["without"]["digest"]
