"""Third-party optimizers: a skipped step leaves no trace."""

from __future__ import annotations

import pytest
from torch.optim import Optimizer

from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same
from tests.torch.optimizer_cases import NAN
from tests.torch.third_party_optimizers import SCHEDULE_FREE, Run, names

every = pytest.mark.parametrize("name", names())


def test_all_of_schedulefree_is_tested():
    schedulefree = pytest.importorskip("schedulefree")
    theirs = {
        name
        for name, each in vars(schedulefree).items()
        if isinstance(each, type) and issubclass(each, Optimizer)
    }
    assert theirs == set(SCHEDULE_FREE)


@every
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_a_skip_leaves_no_trace(name: str, closure: bool):
    mine, twin = Run(name, closure=closure), Run(name, closure=closure)
    heal = attach(mine.optimizer, policies.SKIPS)
    skipped = (0, 4)
    for i in range(8):
        if i in skipped:
            before = mine.view()
            mine.step(i, heal, factor=NAN)
            assert_same(before, mine.view(), *(() if i else ("params", "groups")))
        else:
            mine.step(i, heal)
            twin.step(i)
    assert int(heal.metrics()["heal/skips"]) == len(skipped)
    assert_same(mine.view(), twin.view())
