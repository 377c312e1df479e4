"""The postmortem and its diagnosis, and what the next start says of a killed run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Healer
from healcore.core.decision import Cause
from healcore.errors import IncompleteRun
from healcore.events import Log
from healcore.events.kinds import flags_text
from healcore.events.models import Ending
from healcore.runtime.reporting import postmortem
from healcore.runtime.reporting.diagnosis import RunOutcome, advice, explain, last_line
from healcore.runtime.reporting.postmortem import path_for
from tests.events.sample_events import SAMPLES
from tests.history.test_run_history import run_of
from tests.runtime.store.disk_faults import read_only, small_disk

# -- the diagnosis for every cause and ending -----------------------------------------------------

ALARM = {
    "incident": 4,
    "skip": True,
    "cause": ["NONFINITE_GRAD", "LOSS_SPIKE"],
    "readings": {"loss": 2.31, "grad_norm": 14.2, "threshold": 1.27, "z": 55.0, "z_loss": 3.0},
    "evidence": [{"name": "layers.3.weight", "grad_norm": "nan"}],
    "batches": [[0, 412], [0, 413]],
}


def end_of(ending: str, step: int, *happened: Any, **fields: Any) -> RunOutcome:
    run = run_of(*happened)
    healthy = ending == "completed" and not fields.get("open")
    return RunOutcome(run, ending, step, run.counts(), **{"healthy": healthy, **fields})


STOPPED = end_of(
    "stopped",
    4121,
    ("rollback", 4011, {"onset": 4000, "checkpoint": 3900, "lr": 1e-3, "lr_limit": 5e-4}),
    ("rollback", 4021, {"onset": 4010, "checkpoint": 3800, "batches": [[0, 1]]}),
    ("alarm", 4093, ALARM),
    why="the budget of 2 recoveries is spent",
    open=True,
    lr_scale=0.25,
    last_good=3800,
    last_good_path="checkpoints/step-0000003800.0a1b2c3d",
)


def test_an_explanation_names_cause_evidence_actions_and_advice():
    text = explain(STOPPED)
    assert text.startswith("stopped by the policy (the budget of 2 recoveries is spent) after")
    flat = " ".join(text.split())
    for part in (
        "step 4093: incident 4: nonfinite grad and loss spike; last finite loss 2.31",
        "layers.3.weight (nan)", "epoch 0 batch 412", "skipped 1 step",
        "step 4011: rolled back to checkpoint 3900, learning rate at most 0.0005",
    ):  # fmt: skip
        assert part in flat
    assert text.count("\nCheck: ") == len(advice(STOPPED.cause)) + 1 == 3
    assert text.endswith("checkpoints/step-0000003800.0a1b2c3d")


@pytest.mark.parametrize("ending", Ending)
def test_the_least_that_can_be_known(ending):
    text = explain(end_of(ending, 7))
    assert "step 7" in text
    is_killed = ending in (Ending.GONE, Ending.UNKNOWN)
    assert ("Last known-good: none" in text) is not is_killed
    assert "Tried" not in text


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_advice(cause):
    (hint,) = advice(cause)
    if cause is Cause.PLATEAU:
        for word in ("initialisation", "data", "learning rate 2 to 5 times higher", "lower beta"):
            assert word in hint
    text = explain(end_of("stopped", 7, ("alarm", 3, {"incident": 1, "cause": [cause.name]})))
    assert f"Fault: step 3: incident 1: {flags_text([str(cause.name)])}\n" in text
    assert " ".join(hint.split()[:5]) in text
    others = [advice(other)[0] for other in Cause if other != cause]
    assert hint not in others


def test_a_completed_run_gets_no_lecture():
    text = explain(STOPPED._replace(ending="completed", open=False, healthy=True, why=""))
    assert text.startswith("completed after step 4121\n")
    assert "Check:" not in text
    assert explain(end_of("completed", 40)).endswith(
        "\nLast known-good: none (docs/checkpoints.md)"
    )


def test_the_last_line_names_the_checkpoint_that_a_restart_needs():
    end = end_of("completed", 50, open=False)
    assert last_line(end) == "completed after step 50: no intervention"
    end = end._replace(newest=50)
    assert last_line(end) == (
        "completed after step 50: no intervention; checkpoint 50 is on disk"
    ), "a healthy run needs no earlier checkpoint"
    assert last_line(end._replace(healthy=False)).endswith("; no checkpoint is known-good")
    assert last_line(end._replace(last_good=20)) == last_line(end)
    assert last_line(end._replace(last_good=20, healthy=False)).endswith(
        "; newest known-good checkpoint: step 20"
    )
    run = end_of("completed", 50, ("rollback", 9, {"checkpoint": 2}), newest=50)
    assert last_line(run).startswith("completed after step 50: rolled back once; ")
    twice = run._replace(counts=run.counts._replace(rollbacks=2, lr_cuts=3))
    assert "lowered the learning rate 3 times, rolled back 2 times; " in last_line(twice)


def test_the_explanation_lists_each_fault_with_its_remedy_and_the_steps_it_cost():
    """A spike that only alerts, NaN, a wrong rate that only a comparison finds, a bad batch."""
    nan = {"incident": 1, "skip": True, "cause": ["NONFINITE_LOSS"], "readings": {"loss": "nan"}}
    back = {"onset": 113, "checkpoint": 110, "lr_at_fault": 0.0884, "lr_limit": 0.00571}
    lost = {"onset": 250, "checkpoint": 240, "steps_lost": 6}
    lost |= {"why": "the weights of step 240 are better", "problem": "the loader has no position"}
    lost |= {"by": "earlier_weights", "batches": [[0, 250]], "steps_repeated": 10}
    end = end_of(
        "completed", 300,
        ("alarm", 60, {"cause": ["LOSS_SPIKE"], "alert": ["LOSS_SPIKE"]}),
        ("alarm", 114, {"cause": ["LOSS_SPIKE"]}),
        ("rollback", 134, {**back, "cause": ["NONFINITE_GRAD"], "steps_repeated": 24}),
        ("fault", 180, {"cause": ["DATA"], "problem": "truncated", "answer": "skip_batch"}),
        ("alarm", 240, nan),
        ("rollback", 256, lost),
        open=False,
    )  # fmt: skip
    found = explain(end).split("\nTried:")[0]
    assert [" ".join(each.split()) for each in found.split("\nFault: ")[1:]] == [
        "step 60: loss spike",
        "step 134: rolled back to checkpoint 110, learning rate at most 0.00571 (it was 0.0884), "
        "24 steps are repeated",
        "step 180: fault: data: truncated; answer: skip_batch",
        "step 240: incident 1: nonfinite loss; skipped",
        "step 256: the weights of step 240 are better; rolled back to checkpoint 240, 1 batch "
        "skipped, 10 steps are repeated, 6 steps are not repeated, because the loader has no "
        "position",
    ]
    causes = [cause.name for cause in Cause][:20]
    many = [("alarm", 20 * n, {"cause": [each], "alert": [each]}) for n, each in enumerate(causes)]
    text = explain(end_of("completed", 900, *many, open=False))
    assert f"\nFault: {len(causes) - 10} earlier ones\n" in text


# -- the file -------------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path) -> Path:
    return tmp_path / "run.events.jsonl"


def test_a_full_or_read_only_disk_keeps_the_earlier_postmortem(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as root:
        events = root / "run.events.jsonl"
        assert postmortem.write(events, STOPPED, trace="Traceback ...") is None
        path = path_for(events, "a")
        with pytest.raises(OSError, match="No space left"):
            (root / "filler").write_bytes(b"x" * (1 << 20))
        problem = postmortem.write(events, STOPPED._replace(step=9))
        assert "No space left" in str(problem)
        found = postmortem.read(path)
        assert found["step"] == 4121, "the earlier one is whole"
        assert (found["exception"], found["last_good"]) == ("Traceback ...", 3800)
        assert sorted(os.listdir(root)) == ["filler", path.name]
    root = tmp_path / "root"
    root.mkdir()
    with read_only(root):
        problem = postmortem.write(root / "run.events.jsonl", STOPPED)
        assert "could not be written" in str(problem)


def log_of_a_run(path: Path, **changes: Any) -> str:
    """Writes the events of a run, with other values in `start`; returns its name."""
    log = Log(path)
    for kind, step, more in (
        ("start", 0, {}),
        ("good", 300, {}),
        ("good", 400, {}),
        ("resume", 300, {"checkpoint": 300}),
        ("good", 400, {}),
        ("alarm", 412, {"incident": 2}),
        ("rollback", 413, {}),
        ("save", 350, {}),
    ):
        log.write(kind, step=step, **{**SAMPLES[kind], **more})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0].update(changes)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return log.process_id


def test_the_next_start_writes_the_postmortem_of_a_killed_run(tmp_path, capsys):
    events = tmp_path / "healcore.events.jsonl"
    process = log_of_a_run(events, born=1)
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    with pytest.raises(IncompleteRun), Healer(state=state, store=tmp_path):
        pass
    line = capsys.readouterr().err.splitlines()[0]
    assert line.endswith("the previous run was killed after step 350 or later")
    written = postmortem.read(postmortem.path_for(events, process))
    assert (written["ending"], written["step"], written["process"]["born"]) == ("gone", 350, 1)
    assert "out-of-memory killer" in written["diagnosis"]
