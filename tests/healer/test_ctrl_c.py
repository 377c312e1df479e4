"""Ctrl-C, as a shell and a scheduler see it: real processes, real signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.store import directory
from tests.healer.loops import loop_of, rules, train
from tests.healer.reading import events, postmortems


def program(folder: str, how: str) -> None:
    """Tells of its steps, and goes on when it is told to; its disk may hang."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
    if how == "disk hangs":
        directory.committing.commit = lambda *args: threading.Event().wait()  # type: ignore

    def before(healer: Any, number: int) -> None:
        if number == 7 and not how:
            healer.store.wait()
        print(number, flush=True)
        if number >= 7:
            wait_for_line()

    try:
        train(loop_of("torch"), rules(), range(12), store=Path(folder), before=before)
    except KeyboardInterrupt:
        if how == "caught":
            print("caught", flush=True)
        raise
    finally:
        print("tidied up", flush=True)


def wait_for_line() -> None:
    """Reads one line, and comes back to Python meanwhile.

    A signal that comes just before a blocking read is noted in C, and its handler would run only
    when the read is over.
    """
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass
    sys.stdin.readline()


@contextmanager
def started(folder: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """The program, waiting in its step 7."""
    code = "import sys; from tests.healer import test_ctrl_c as t; t.program(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder, how],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(line == "7\n" for line in process.stdout), process.stderr and process.stderr.read()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and waits until the program has taken note."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    assert any("Ctrl-C again stops at once" in line for line in process.stderr)


@pytest.mark.parametrize("how", ["", "caught"])
def test_the_first_one_saves_and_ends_with_130_and_a_plain_line(how, tmp_path):
    with started(tmp_path, how) as process:
        interrupt(process)
        out, err = process.communicate("\n" * 5, timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted after step 8: checkpoint 8 is on disk" in err
    assert out.split("\n")[:-1] == ["caught", "tidied up"][how == "" :]
    assert postmortems(tmp_path)[0]["ending"] == "interrupted"
    loop = loop_of("torch")
    assert train(loop, rules(), range(12), store=tmp_path)["step"] == 12
    assert loop.faults.order == [8, 9, 10, 11]


@pytest.mark.parametrize("how", ["", "disk hangs"])
def test_the_second_one_stops_at_once(how, tmp_path):
    """In the middle of a step, and with a save under way that would never end."""
    with started(tmp_path, how) as process:
        interrupt(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "stopped at once" in err
    assert not events(tmp_path, "end")
    expected = 0 if how else 5
    loop = loop_of("torch")
    train(loop, rules(), range(12), store=tmp_path)
    assert loop.faults.order[0] == expected


def test_a_second_one_while_the_run_is_being_saved(tmp_path):
    with started(tmp_path, "disk hangs") as process:
        interrupt(process)
        assert process.stdin is not None
        process.stdin.write("\n" * 5)
        process.stdin.close()
        process.stdin = None
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its disk
            process.communicate(timeout=3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
    assert process.returncode == 130


def test_in_a_notebook_the_second_one_leaves_the_kernel_alive(tmp_path):
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.ps1 = ">>> "  # as IPython sets it
from tests.healer.loops import loop_of, rules, train
def before(healer, number):
    if number == 7:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
try:
    train(loop_of("torch"), rules(), range(12), store=sys.argv[1], before=before)
except KeyboardInterrupt:
    print("alive")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
