"""Whether a process is gone."""

from __future__ import annotations

import os

import pytest

from healcore.events.process import current_process, pid_gone
from tests.events.processes import output, program, python


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_gone():
    """Signals may not be sent to it."""
    child = program("gone", os.getpid())
    assert output(child).strip() == "False"


def test_this_process_and_a_number_that_no_process_can_have():
    assert current_process().gone() is False
    assert pid_gone(os.getpid()) is False
    assert pid_gone(1 << 30) is True


def test_a_zombie_is_gone():
    child = python("-c", "")
    while not pid_gone(child.pid):
        pass
    assert child.wait() == 0


def test_no_signal_is_sent_where_it_would_be_ctrl_c(monkeypatch):
    """On Windows `os.kill(pid, 0)` interrupts the process."""

    class Windows:
        name = "nt"

        def kill(self, pid: int, number: int) -> None:
            raise AssertionError("a signal was sent")

    monkeypatch.setattr("healcore.events.process.os", Windows())
    assert pid_gone(os.getpid()) is None
