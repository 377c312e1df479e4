"""Two processes with one sharded model: restarts, and a rollback."""

from __future__ import annotations

import pytest

from tests.torch.driver.sharded_ranks import OPTIMIZERS, ROLLBACK
from tests.torch.worlds import Worlds, worlds_of

worlds = worlds_of("tests.torch.driver.sharded_ranks", 600)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_a_restart_is_the_run_without_one_to_the_bit(name: str, worlds: Worlds):
    for whole, restarted in worlds.of(2, [], name):
        assert whole == restarted


def test_two_ranks_roll_back_together(worlds: Worlds):
    assert worlds.of(2, [], ROLLBACK) == [True, True]
