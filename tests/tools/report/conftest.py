import pytest

from tests.tools.report.small_runs import broken_and_resumed, train


@pytest.fixture(scope="session")
def healed(tmp_path_factory):
    """Two rollbacks, some skips, completed."""
    return train(tmp_path_factory.mktemp("healed"), [*range(250, 262), 400, *range(500, 512)])


@pytest.fixture(scope="session")
def stopped(tmp_path_factory):
    """A run whose data is NaN from batch 300 on, so that the policy stops it."""
    return train(tmp_path_factory.mktemp("stopped"), range(300, 600))


@pytest.fixture(scope="session")
def resumed(tmp_path_factory):
    """An exception, and a second process."""
    return broken_and_resumed(tmp_path_factory.mktemp("resumed"))
