"""On an accelerator: decisions, rollbacks and waits of the host, without the hardware."""

from __future__ import annotations

import pytest

from tests import forked_programs

TORCH = ("torch", "healcore.torch", "healcore.torch.driver", "healcore.torch.store")


def run(check: str) -> None:
    done = forked_programs.run("-m", "tests.torch.simulated_runs", *check.split(), imports=TORCH)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("check", ["mixed", "save", "decisions default"])
def test_on_a_simulated_accelerator(check: str):
    run(check)


@pytest.mark.parametrize(
    "check",
    [
        "decisions pretraining",
        "decisions default SGD",
        "decisions default Adagrad",
        "decisions default clip=autoclip",
        "decisions default clip=adagc",
        "rollback",
    ],
)
def test_more_on_a_simulated_accelerator(check: str):
    run(check)
