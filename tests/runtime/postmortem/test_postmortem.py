"""The postmortem: whole or not at all, one for each run, and of a killed run by the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from healcore.core.verdict import Cause
from healcore.events import Log, process, read
from healcore.history import Counts, Run, runs_of
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.postmortem.postmortem import path_for
from tests.events.processes import first_line, python
from tests.events.sample_events import SAMPLES
from tests.history.test_run import START
from tests.history.test_run import events as events_of
from tests.runtime.postmortem.test_diagnosis import ALARM, STOPPED, end_of
from tests.runtime.store.disk_faults import read_only, small_disk


@pytest.fixture
def events(tmp_path) -> Path:
    return tmp_path / "run.events.jsonl"


def waiting_run(path: Path) -> subprocess.Popen[str]:
    """A run that writes its events, and then waits to be killed."""
    return python("-m", "tests.runtime.postmortem.test_postmortem", path)


def rewritten(path: Path, **changes) -> None:
    """The same file, with other values in `start`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0].update(changes)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# -- writing --------------------------------------------------------------------------------------


def test_the_postmortem_of_this_process(events):
    run = Run()
    run.add(Log(events).write("start", step=0, policy="default"))
    end = RunEnd(run, "stopped", 4, Counts(skips=2), fault=Cause.HANG, last_good=3)
    assert postmortem.write(events, end, trace="Traceback ...", lost=3) is None
    content = postmortem.read(path_for(events, run.processes[0].id))
    assert (content["ending"], content["step"], content["skips"]) == ("stopped", 4, 2)
    assert (content["cause"], content["last_good"], content["lost_events"]) == (["HANG"], 3, 3)
    assert content["exception"] == "Traceback ..."
    assert content["process"]["pid"] == os.getpid()
    assert "python" in content["environment"]
    assert content["diagnosis"].startswith("healcore stopped the run at step 4")
    assert 0 <= content["seconds"] < 60


def test_a_full_and_a_read_only_disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as root:
        assert postmortem.write(root / "run.events.jsonl", STOPPED) is None
        path = path_for(root / "run.events.jsonl", "a")
        with pytest.raises(OSError, match="No space left"):
            (root / "filler").write_bytes(b"x" * (1 << 20))
        problem = postmortem.write(root / "run.events.jsonl", STOPPED._replace(step=9))
        assert "No space left" in str(problem)
        assert postmortem.read(path)["step"] == 4121, "the earlier one is whole"
        assert sorted(os.listdir(root)) == ["filler", path.name]
    root = tmp_path / "root"
    root.mkdir()
    with read_only(root):
        problem = postmortem.write(root / "run.events.jsonl", STOPPED)
        assert "could not be written" in str(problem)


# -- of a run that was killed ---------------------------------------------------------------------


def of_killed(path: Path) -> dict[str, Any] | None:
    """The postmortem that the next start writes, or None."""
    run = postmortem.last_run(path)
    if run is None or not postmortem.of_killed(path, run):
        return None
    return postmortem.read(path_for(path, run.processes[-1].id))


def test_kill_9(events):
    run = waiting_run(events)
    name = first_line(run)
    assert of_killed(events) is None, "it is still there"
    os.kill(run.pid, signal.SIGKILL)
    os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
    found = of_killed(events)  # a zombie that nobody has waited for is gone all the same
    run.communicate()
    assert found is not None
    assert found == of_killed(events)
    assert (found["run"], found["ending"], found["step"]) == (name, "killed", 350)
    assert (found["incidents"], found["cause"]) == (2, ["LOSS_SPIKE"])
    assert found["rollbacks"] == [
        {
            "step": 413, "onset": 4, "target": 300, "skipped": 2,
            "lr": 1e-3, "lr_limit": 5e-4, "lr_scale": 0.5,
        }
    ]  # fmt: skip
    assert found["lr_scale"] == 0.5
    assert found["last_good"] == 300, "400 is abandoned"
    assert found["certain"]
    assert found["process"]["pid"] == run.pid
    assert found["environment"]["python"]
    assert found["ended"] == read(events).events[-1]["time"]
    assert 0 <= found["seconds"] < 60
    text = " ".join(found["diagnosis"].split())
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
    assert of_killed(killed) is None
    assert [p for p in killed.parent.iterdir() if "postmortem" in p.name] == [
        path_for(killed, read(killed).events[0]["run"])
    ]


def test_a_number_that_is_used_again_and_another_host(killed):
    """A later process may have the number of the killed one; another host cannot be seen."""
    me = process.current_process()
    rewritten(killed, pid=me.pid)
    found = of_killed(killed)
    assert found is not None
    assert found["certain"]
    rewritten(killed, born=me.born)
    assert of_killed(killed) is None
    rewritten(killed, host="elsewhere")
    found = of_killed(killed)
    assert found is not None
    assert not found["certain"]
    assert "elsewhere" in found["diagnosis"]


# -- the end of a killed run is the end of a live run, by the same events ------------------------


def test_an_older_incident_is_not_reported_for_a_newer_one():
    end = end_of(
        "killed",
        91,
        ("incident", 5, {"incident": 1, "onset": 4, "cause": ["OVERFIT"]}),
        ("alarm", 5, {**ALARM, "incident": 1}),
        ("incident", 90, {"incident": 2, "onset": 89, "cause": ["LOSS_SPIKE"]}),
        ("alarm", 90, {"incident": 2, "cause": ["LOSS_SPIKE"], "skip": True}),
        ("rollback", 91, {"checkpoint": 80, "outcome": "done", "batches": [[1, 1]]}),
    )
    text = " ".join(explain(end).split())
    assert (end.cause, end.counts.incidents, end.counts.skips) == (Cause.LOSS_SPIKE, 2, 2)
    assert "loss_spike from step 89 on" in text
    assert "layers.3" not in text


def processes(*happened: tuple[Any, ...]) -> Run:
    """The last run of some processes, whose events follow each other."""
    each = {str(number): events_of(*of, run=str(number)) for number, of in enumerate(happened)}
    return runs_of(each)[-1]


def test_the_last_good_checkpoint_is_of_the_last_store():
    resumed = ("start", None, {"mode": "heal", "store": "there", "resumes": True})
    other = ("start", None, {"mode": "heal", "store": "elsewhere", "resumes": True})
    first = (START, ("good", 300, {}), ("good", 400, {}))
    same = processes(first, (resumed, ("damaged", 400, {"problem": "a bit"})))
    assert (same.last_good, same.newest["damaged"][0].step) == (300, 400)
    assert processes(first, (other,)).last_good is None
    assert processes(first, (other, ("good", 20, {}))).last_good == 20


def test_counts_are_of_the_whole_run_and_the_step_is_of_the_last_process():
    resumed = ("start", None, {"mode": "heal", "store": "there", "resumes": True})
    one = (START, ("alarm", 5, ALARM), ("save", 6, {}))
    both = processes(one, (resumed, ("alarm", 8, ALARM), ("save", 9, {})))
    assert (both.counts().skips, both.step) == (2, 9)
    new = processes(one, (START, ("save", 4, {})))
    assert (new.counts().skips, new.step) == (0, 4)


if __name__ == "__main__":
    log = Log(sys.argv[1])
    for kind, step, more in (
        ("start", 0, {}),
        ("good", 300, {}),
        ("good", 400, {}),
        ("incident", 412, {"onset": 412, "incident": 2}),
        ("alarm", 412, {}),
        ("resume", 300, {"checkpoint": 300}),
        ("rollback", 413, {}),
        ("save", 350, {}),
    ):
        log.write(kind, step=step, **{**SAMPLES[kind], **more})
    print(log.run, flush=True)
    time.sleep(60)
