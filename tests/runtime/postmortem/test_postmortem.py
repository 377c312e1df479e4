"""The postmortem: whole or not at all, one for each run, and of a killed run by the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from healcore.core.verdict import Cause
from healcore.events import Log, process, read
from healcore.events.log import Event, History
from healcore.history import runs_of
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.diagnosis import RunEnd
from healcore.runtime.postmortem.postmortem import end_of_killed, of, of_killed, path_for
from tests.events.processes import first_line, python
from tests.runtime.postmortem.test_diagnosis import STOPPED
from tests.runtime.store.disk_faults import read_only, small_disk


@pytest.fixture
def events(tmp_path) -> Path:
    return tmp_path / "run.events.jsonl"


def waiting_run(path: Path) -> subprocess.Popen[str]:
    return python("-m", "tests.runtime.postmortem.waiting_run", path)


def rewritten(path: Path, **changes) -> None:
    """The same file, with other values in `start`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0].update(changes)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# -- writing --------------------------------------------------------------------------------------


def test_the_postmortem_of_this_process(events):
    log = Log(events)
    log.write("start", step=0, policy="default")
    found = of(STOPPED, log, seconds=1.5, trace="Traceback ...")
    path = path_for(events, log.run)
    assert postmortem.write(path, found) is None
    content = postmortem.read(path)
    assert content["ending"] == "stopped"
    assert content["run"] == log.run
    assert content["cause"] == ["NONFINITE_GRAD", "LOSS_SPIKE"]
    assert content["rollbacks"][1]["target"] == STOPPED.rollbacks[1].target
    assert content["last_good"] == 3800
    assert content["exception"] == "Traceback ..."
    assert content["process"]["pid"] == os.getpid()
    assert "python" in content["environment"]
    assert content["diagnosis"].startswith("healcore stopped the run at step 4121")


def test_a_full_and_a_read_only_disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as root:
        path = root / "run.postmortem.a.json"
        assert postmortem.write(path, of(STOPPED, Log(None))) is None
        with pytest.raises(OSError, match="No space left"):
            (root / "filler").write_bytes(b"x" * (1 << 20))
        problem = postmortem.write(path, of(STOPPED._replace(step=9), Log(None)))
        assert "No space left" in str(problem)
        assert postmortem.read(path)["step"] == 4121, "the earlier one is whole"
        assert sorted(os.listdir(root)) == ["filler", path.name]
    root = tmp_path / "root"
    root.mkdir()
    with read_only(root):
        problem = postmortem.write(root / "a.json", of(STOPPED, Log(None)))
        assert "could not be written" in str(problem)


# -- of a run that was killed ---------------------------------------------------------------------


def test_kill_9(events):
    run = waiting_run(events)
    name = first_line(run)
    assert of_killed(events) is None, "it is still there"
    assert not path_for(events, name).exists()
    os.kill(run.pid, signal.SIGKILL)
    os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
    found = of_killed(events)  # a zombie that nobody has waited for is gone all the same
    run.communicate()
    again = of_killed(events)
    assert found is not None
    assert again is not None
    assert found.to_dict() == again.to_dict()
    assert found.run == name
    end = found.end
    assert (end.ending, end.step, end.incidents) == ("killed", 350, 2)
    assert end.cause == Cause.LOSS_SPIKE
    (back,) = end.rollbacks
    assert (back.step, back.onset, back.target, back.skipped) == (413, 4, 300, 2)
    assert (back.lr, back.lr_limit, back.lr_scale) == (1e-3, 5e-4, 0.5)
    assert end.lr_scale == 0.5
    assert end.last_good == 300, "400 is abandoned"
    assert found.certain
    assert found.process is not None
    assert found.process.pid == run.pid
    assert found.environment["python"]
    assert found.ended == read(events).events[-1]["time"]
    assert 0 <= (found.seconds or -1) < 60
    content = postmortem.read(path_for(events, name))
    assert content["ending"] == "killed"
    assert content["rollbacks"][0]["target"] == 300
    text = " ".join(content["diagnosis"].split())
    for part in ("step 350", "loss_spike", "layers.3.weight (nan)", "epoch 0 batch 7", "step 300"):
        assert part in text


@pytest.fixture
def killed(events) -> Path:
    """The events of a run that was killed and waited for."""
    run = waiting_run(events)
    first_line(run)
    run.kill()
    run.communicate()
    return events


def test_the_next_start_closes_the_case(killed):
    assert of_killed(killed) is not None
    log = Log(killed)
    log.write("start", step=350, policy="default")
    assert of_killed(killed) is None, "this one is alive"
    log.write("end", step=360, ending="completed")
    log.close()
    assert of_killed(killed) is None
    assert [p for p in killed.parent.iterdir() if "postmortem" in p.name] == [
        path_for(killed, read(killed).events[0]["run"])
    ]


def test_a_number_that_is_used_again(killed):
    """The process of that number is another one, born later: ours, in a restarted container."""
    me = process.current_process()
    rewritten(killed, pid=me.pid)
    found = of_killed(killed)
    assert found is not None
    assert found.certain
    rewritten(killed, born=me.born)
    assert of_killed(killed) is None


def test_another_host(killed):
    rewritten(killed, host="elsewhere")
    found = of_killed(killed)
    assert found is not None
    assert not found.certain
    assert "elsewhere" in found.end.why


# -- the facts that the events of a killed run give ---------------------------------------------

ALARM: dict[str, Any] = {
    "incident": 1,
    "cause": ["LOSS_SPIKE"],
    "readings": {"loss": 2.0, "grad_norm": "inf", "threshold": 1.0, "z": 3.0, "z_loss": 4.0},
    "skip": True,
}


def history(*happened: tuple[str, int | None, dict[str, Any]], run: str = "a") -> list[Event]:
    return [
        {"schema": 1, "seq": seq, "run": run, "kind": kind, "step": step, **fields}
        for seq, (kind, step, fields) in enumerate(happened)
    ]


def end_of(*processes: list[Event]) -> RunEnd:
    """The facts about the last of the processes."""
    history = History([event for events in processes for event in events], [])
    return end_of_killed(runs_of(history.runs())[-1])


START = ("start", None, {"mode": "heal", "store": "there"})


def test_an_older_incident_is_not_reported_for_a_newer_one():
    evidence = [{"name": "old", "grad_norm": 1.0}]
    end = end_of(
        history(
            START,
            ("incident", 5, {"incident": 1, "onset": 4, "cause": ["OVERFIT"]}),
            ("alarm", 5, {**ALARM, "evidence": evidence, "batches": [[0, 5]]}),
            ("incident", 90, {"incident": 2, "onset": 89, "cause": ["LOSS_SPIKE"]}),
            ("alarm", 90, {**ALARM, "incident": 2}),
            ("rollback", 91, {"checkpoint": 80, "outcome": "done", "batches": [[1, 1]]}),
        )
    )
    assert (end.cause, end.onset, end.incidents) == (Cause.LOSS_SPIKE, 89, 2)
    assert (end.evidence, end.batches) == ((), ())
    assert end.readings is not None
    assert end.readings.grad_norm == float("inf")
    assert end.skips == 2


def test_the_last_good_checkpoint_is_of_the_last_store():
    resumed = ("start", None, {"mode": "heal", "store": "there", "resumes": True})
    other = ("start", None, {"mode": "heal", "store": "elsewhere", "resumes": True})
    first = history(START, ("good", 300, {}), ("good", 400, {}))
    same = history(resumed, ("damaged", 400, {"problem": "a bit"}), run="b")
    assert end_of(first, same).last_good == 300
    assert end_of(first, same).damaged == (400,)
    assert end_of(first, history(other, run="b")).last_good is None
    assert end_of(first, history(other, ("good", 20, {}), run="b")).last_good == 20


def test_counts_are_of_the_whole_run_and_the_step_is_of_the_last_process():
    resumed = ("start", None, {"mode": "heal", "store": "there", "resumes": True})
    one = history(START, ("alarm", 5, ALARM), ("save", 6, {}))
    two = history(resumed, ("alarm", 8, ALARM), ("save", 9, {}), run="b")
    assert (end_of(one, two).skips, end_of(one, two).step) == (2, 9)
    new = history(START, ("save", 4, {}), run="b")
    assert (end_of(one, new).skips, end_of(one, new).step) == (0, 4)
