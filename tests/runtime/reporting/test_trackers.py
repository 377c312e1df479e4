"""Each real client stores the metrics. A tracker that fails is reported and changes no run."""

import itertools
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from healcore.runtime.reporting.trackers import select
from tests.healer.run_directory import events_of
from tests.healer.training_loops import Faults, breaks_off, loop_of, rules, same, train
from tests.runtime.reporting.read_back import STORED, asked


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The working directory; its name is the project in each tracker."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_a_restarted_run_with_a_rollback_is_stored_as_one_run(name, folder):
    data = range(20)
    options: Any = {"store": folder / "c", "trackers": asked(name, folder)}
    breaks_off(loop_of("torch"), rules(), data, at=8, **options)
    if name == "wandb":
        time.sleep(1.1)  # the folder of an offline run is named by the second in which it begins
    loop = loop_of("torch", Faults(once=[13]))
    assert train(loop, rules(), data, **options).rollbacks == 1

    # Tracking changes nothing, and nothing went wrong.
    plain = loop_of("torch", Faults(once=[13]))
    train(plain, rules(), data)
    assert same(plain.weights(), loop.weights())
    events = events_of(folder / "c" / "healcore.events.jsonl")
    assert not [event for event in events if event["kind"] == "problem"]

    # The tracker has the rows of the metrics file, of both processes in one run.
    found = STORED[name](folder)
    expected = events_of(folder / "c" / "healcore.metrics.jsonl")
    assert {line["step"] for line in expected} == set(range(19)), "one bad batch is left out"
    assert (found.runs, len({line["run"] for line in expected})) == (1, 2)
    assert [step for step, _ in found.rows] == [line["step"] for line in expected]
    for (_, row), line in zip(found.rows, expected, strict=True):
        for metric in ("loss", "grad_norm", "lr_scale", "skip"):
            value = pytest.approx(float(line[metric]), nan_ok=True)
            assert row[f"heal/{metric}"] == value, (metric, line)

    # And the sentences about what happened.
    assert any("rollback" in text and "checkpoint" in text for text in found.texts), found.texts
    if name == "tensorboard":  # the others have alerts
        for kind in ("resume", "completed"):
            assert any(kind in text for text in found.texts), kind


def test_own_objects_get_everything(folder):
    calls: list[str] = []
    mine = SimpleNamespace(
        start=lambda run: calls.append(f"start {run.config['policy']}"),
        metrics=lambda step, values: calls.append(f"step {step}"),
        event=lambda event: calls.append(event["kind"]),
        close=lambda: calls.append("close"),
    )
    train(loop_of("torch"), rules(), range(3), trackers=mine)
    assert calls[:2] == ["start test", "start"]
    assert [each for each in calls if "step" in each] == ["step 0", "step 1", "step 2"]
    assert calls[-2:] == ["end", "close"]


@pytest.mark.parametrize(
    ("given", "message"),
    [("wandbb", "wandb:PROJECT"), ("wandb:", "got 'wandb:'"), (["wandb", None], "got None")],
)
def test_what_is_no_tracker(given, message):
    with pytest.raises(ValueError, match=message):
        select(given)


def test_a_wandb_run_keeps_its_own_steps(folder):
    import wandb  # here: it takes a second, and each worker imports all test files

    run = wandb.init(project=folder.name, settings={"console": "off"})

    def log(healer, number):
        if number in (4, 9):
            run.log({"epoch": number // 5}, step=number // 5)  # W&B refuses it after a higher one

    train(loop_of("torch"), rules(), range(10), before=log, trackers="wandb")
    assert wandb.run is run, "it is still open"
    run.log({"heal/grad_norm": 7.0, "mine": 1.0}, step=5)
    run.finish()
    rows = STORED["wandb"](folder).rows
    assert [row for _, row in rows][-1] == {"heal/grad_norm": 7.0}
    assert len(rows) <= 4, "rows are the user's"
    assert run.config["healcore"]["policy"] == "test"


def run(folder: Path, **options: Any) -> list[Any]:
    loop = loop_of("torch", Faults(once=[13]))
    result = train(loop, rules(), range(20), events=folder / "run.events.jsonl", **options)
    assert (result.step, result.rollbacks) == (19, 1), "one bad batch is left out"
    return loop.weights()


CANNOT_START: dict[str, tuple[str, dict[str, str]]] = {  # a place, and the environment
    "wandb": (f"wandb:{'x' * 200}", {}),
    "trackio": ("trackio", {"TRACKIO_SERVER_URL": "http://127.0.0.1:9"}),
    "tensorboard": ("tensorboard:file", {}),
}


@pytest.mark.parametrize("name", STORED)
def test_a_tracker_that_cannot_start_changes_no_bit(name, folder, monkeypatch, capsys):
    (folder / "file").write_text("")
    place, environment = CANNOT_START[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert same(run(folder, trackers=place), run(folder / "plain"))
    (problem,) = re.findall(r"tracker (\w+) fails, training continues", capsys.readouterr().err)
    assert problem.lower() == name


def broken(fault: Any) -> Any:
    """A tracker that is broken from its tenth record on."""
    records = itertools.count()

    def metrics(step: int, values: Any) -> None:
        if next(records) >= 9:
            fault()

    return SimpleNamespace(metrics=metrics, event=lambda event: None)


def test_a_tracker_that_fails_later_changes_no_bit(folder, capsys):
    assert same(run(folder, trackers=broken(sys.exit)), run(folder / "plain"))
    (problem,) = re.findall("tracker SimpleNamespace fails.*", capsys.readouterr().err)
    assert "SystemExit" in problem
