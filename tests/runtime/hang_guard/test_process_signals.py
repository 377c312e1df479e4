"""Signals that the program uses already are left to it, also where a handler in C has them."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import types
from typing import Any

import lightning
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from healcore.runtime.hang_guard import process_signals
from healcore.runtime.hang_guard.watched_process import WatchedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="real-time signals of Linux")


def test_another_signal_is_taken_than_one_that_faulthandler_has(tmp_path, monkeypatch):
    before = process_signals.install().dump  # of a Healer in this process, or now
    # As if all that earlier tests have installed were the program's.
    monkeypatch.setattr(process_signals, "_own", set())
    wanted = next(n for n in process_signals.DUMPS if n not in process_signals._used())
    with open(tmp_path / "own", "w") as own:
        faulthandler.register(wanted, file=own)
        try:
            assert signal.getsignal(wanted) is signal.SIG_DFL, "Python does not know of it"
            found = process_signals.install()
            assert found.dump not in (0, wanted, before)
            os.kill(os.getpid(), wanted)
            assert "test_process_signals" in (tmp_path / "own").read_text()
            os.kill(os.getpid(), found.dump)
            assert b"test_process_signals" in os.pread(found.stacks, 100_000, 0)
        finally:
            faulthandler.unregister(wanted)
            faulthandler.unregister(found.dump)


def test_signals_that_are_set_back_are_installed_again(tmp_path):
    process_signals.install()
    # What Lightning's Trainer does at the end of a fit.
    trainer = lightning.Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert not {process_signals.END, process_signals.install().dump} - process_signals._used()


def test_a_process_that_has_no_handler_is_not_signalled(tmp_path):
    """It would end."""
    with subprocess.Popen(["sleep", "60"]) as process:
        settings: Any = types.SimpleNamespace(pid=process.pid, stacks=os.memfd_create("stacks"),
                                         dump=process_signals.DUMPS[0], thread=1)  # fmt: skip
        watched = WatchedProcess(settings)
        assert watched.stacks() == ""
        assert process.poll() is None
        process.kill()
