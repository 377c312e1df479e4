"""On an accelerator: decisions, rollbacks and waits of the host, without the hardware."""

from __future__ import annotations

import re

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
        "scaler",
        "rollback",
        "gpu_kit",
    ],
)
def test_more_on_a_simulated_accelerator(check: str):
    run(check)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("wait", "the host has waited for the device"),
        ("upload", "no CUDA graph can capture"),
        ("decision", "other decisions"),
        ("enforcement", "not enforced"),
    ],
)
def test_the_gpu_kit_finds_what_is_broken(broken: str, why: str):
    """`wait`: an extra `.item()` in the step."""
    done = forked_programs.run("-m", "tests.torch.simulated_runs", "gpu_kit", broken, imports=TORCH)
    assert done.returncode == 1
    assert re.search(rf"AssertionError: .*{why}", done.stderr), done.stderr
