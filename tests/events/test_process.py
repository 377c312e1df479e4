"""Whether a process is gone."""

from __future__ import annotations

import os

from healcore.events.process import current_process, pid_gone
from tests.events.processes import python


def test_this_process_and_a_number_that_no_process_can_have():
    assert current_process().gone() is False
    assert pid_gone(os.getpid()) is False
    assert pid_gone(1 << 30) is True


def test_a_zombie_is_gone():
    child = python("-c", "")
    while not pid_gone(child.pid):
        pass
    assert child.wait() == 0
