"""On an accelerator: decisions, rollbacks and waits of the host, without the hardware."""

import pytest

from tests import forked_programs

FAST = ("mixed", "offloaded", "decisions default")
SLOW = (
    "decisions pretraining",
    "decisions default SGD",
    "decisions default Adagrad",
    "decisions default clip=autoclip",
    "decisions default clip=adagc",
    "rollback",
)


@pytest.mark.parametrize(
    "check", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_on_a_simulated_accelerator(check: str):
    done = forked_programs.run("-m", "tests.torch.simulated_runs", *check.split())
    assert done.returncode == 0, done.stderr
