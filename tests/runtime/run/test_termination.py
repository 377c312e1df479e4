"""Real signals. The run is `python -m tests.runtime.run.test_termination FOLDER HOW`."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.run.ending.exits import Terminated
from tests.forked_programs import ForkedProgram
from tests.healer.run_directory import events, postmortems
from tests.healer.test_endings import accumulating_torch_loop
from tests.healer.training_loops import SKIPS, Faults, at, loop_of, rules, train
from tests.open_run import run_of


@contextmanager
def started(folder: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """The program, waiting in its step 7."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process: Any = ForkedProgram("-m", "tests.runtime.run.test_termination", folder, how, **pipes)
    assert any(line == "7\n" for line in process.stdout), process.stderr.read()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def interrupt(process: Any) -> None:
    process.send_signal(signal.SIGINT)
    assert any("Ctrl-C again stops at once" in line for line in process.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "caught"])
def test_the_first_one_saves_and_ends_with_130_and_a_plain_line(how, tmp_path):
    with started(tmp_path, how) as process:
        interrupt(process)
        out, err = process.communicate("\n" * 5, timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "keyboard after step 8: no intervention; checkpoint 8 is on disk" in err
    assert out.split("\n")[:-1] == ["caught", "tidied up"][how == "" :]
    (found,) = postmortems(tmp_path)
    assert (found["ending"], found["process"]["pid"]) == ("interrupted", process.pid)
    assert found["environment"]["python"]
    assert 0 < found["seconds"] < 600
    loop = loop_of("torch")
    assert train(loop, rules(), range(12), store=tmp_path).step == 12
    assert loop.faults.order == [8, 9, 10, 11]


def test_the_second_one_stops_at_once_in_the_middle_of_a_step(tmp_path):
    with started(tmp_path) as process:
        interrupt(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT, "which a shell shows as 130"
    assert "Traceback" not in err
    assert not events(tmp_path, "end")
    loop = loop_of("torch")
    train(loop, rules(), range(12), store=tmp_path)
    assert loop.faults.order[0] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "after", "status"),
    [
        (signal.SIGTERM, 0.2, 128 + signal.SIGTERM),  # of a scheduler that signals twice
        (signal.SIGINT, 0.2, 128 + signal.SIGTERM),
        (signal.SIGTERM, 1.5, 128 + signal.SIGTERM),
    ],
)
def test_a_later_signal_changes_nothing(second, after, status, tmp_path):
    with started(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(after)
        process.send_signal(second)
        time.sleep(0.2)
        _, err = process.communicate("\n" * 5, timeout=600)
    assert process.returncode == status, err
    assert "checkpoint 8 is on disk" in err


def test_sigterm_in_an_incident_saves_too_and_in_an_accumulation_after_its_step(tmp_path):
    ask = at(24, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated):
        train(loop_of("torch", Faults(always=[23])), SKIPS, range(40), store=tmp_path, before=ask)
    assert events(tmp_path, "save")[-1]["step"] == 25
    with pytest.raises(Terminated):
        accumulating_torch_loop(tmp_path / "2", batches=40, terminated_at=9)
    assert events(tmp_path / "2", "save")[-1]["step"] == 3, "the third step ends with batch 11"


def main(folder: str, how: str) -> None:
    """Prints its steps. From step 7 on it waits for a line before each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"

    def before(healer: Any, number: int) -> None:
        if number == 7 and not how:
            run_of(healer).store.wait()
        print(number, flush=True)
        # A signal that comes just before a blocking read is noted in C, and its handler would run
        # only when the read is over.
        while number >= 7 and not select.select([sys.stdin], [], [], 0.05)[0]:
            pass
        if number >= 7:
            sys.stdin.readline()

    try:
        train(loop_of("torch"), rules(), range(12), store=Path(folder), before=before)
    except KeyboardInterrupt:
        if how == "caught":
            print("caught", flush=True)
        raise
    finally:
        print("tidied up", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
