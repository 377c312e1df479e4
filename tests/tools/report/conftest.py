from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.healer.training_loops import broken_at
from tests.tools.report.small_runs import train


@pytest.fixture(scope="session")
def healed(tmp_path_factory) -> Path:
    """Two rollbacks, some skips, completed."""
    return train(tmp_path_factory.mktemp("healed"), [*range(250, 262), 400, *range(500, 512)])


@pytest.fixture(scope="session")
def stopped(tmp_path_factory) -> Path:
    """A run whose data is NaN from batch 300 on, so that the policy stops it."""
    return train(tmp_path_factory.mktemp("stopped"), range(300, 600))


@pytest.fixture(scope="session")
def resumed(tmp_path_factory) -> Path:
    """A process that dies of an exception at batch 330, and one that resumes its checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")
    with contextlib.suppress(RuntimeError):
        train(folder, range(150, 162), before=broken_at(330), store=folder / "checkpoints")
    return train(folder, range(450, 462), store=folder / "checkpoints")
