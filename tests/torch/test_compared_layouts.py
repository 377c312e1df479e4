"""Earlier weights are evaluated in every layout of several ranks, and training does not notice."""

from __future__ import annotations

import pytest

from tests.torch.compared_layouts import KEPT, LAYOUTS, SECONDS
from tests.torch.worlds import Worlds, worlds_of

FAST = ("DDP", "FSDP2", "FSDP2, bfloat16", "tensor parallel", "loss in parts")
SLOW = tuple(name for name in LAYOUTS[2] if name not in FAST)
CASES = [
    *((2, FAST, name) for name in FAST),
    *(pytest.param(2, SLOW, name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(4, tuple(LAYOUTS[4]), name, marks=pytest.mark.slow) for name in LAYOUTS[4]),
]


worlds = worlds_of("tests.torch.compared_layouts", SECONDS)


@pytest.mark.parametrize(("world", "layouts", "name"), CASES)
def test_earlier_weights_have_their_loss_and_training_does_not_notice(
    world: int, layouts: tuple[str, ...], name: str, worlds: Worlds
):
    for each in worlds.of(world, layouts, name):
        then = each["with"]["losses"][KEPT]
        assert len(each["with"]["again"]) > 3
        for losses in each["with"]["again"]:
            assert losses == [then]  # to the bit: after each step, and twice in a row
        assert each["with"]["losses"] == each["without"]["losses"]
        assert each["with"]["digest"] == each["without"]["digest"]
