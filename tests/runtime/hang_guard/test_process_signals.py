"""Signals that the program uses already are left to it, also where a handler in C has them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import pytest

from healcore.runtime.hang_guard import process_signals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="real-time signals of Linux")


def test_another_signal_is_taken_than_one_that_faulthandler_has(tmp_path, monkeypatch):
    before = process_signals.install().dump  # of a Healer in this process, or now
    # As if all that earlier tests have installed were the program's.
    monkeypatch.setattr(process_signals, "_own", set())
    wanted = next(each for each in process_signals.DUMPS if each != before)
    with open(tmp_path / "own", "w") as own:
        faulthandler.register(wanted, file=own)
        try:
            assert signal.getsignal(wanted) is signal.SIG_DFL, "Python does not know of it"
            found = process_signals._install.__wrapped__(0)
            assert found.dump not in (0, wanted, before)
            os.kill(os.getpid(), wanted)
            assert "test_process_signals" in (tmp_path / "own").read_text()
            os.kill(os.getpid(), found.dump)
            assert b"test_process_signals" in os.pread(found.stacks, 100_000, 0)
        finally:
            faulthandler.unregister(wanted)
            faulthandler.unregister(found.dump)
