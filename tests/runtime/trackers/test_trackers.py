"""Each real client stores the numbers of the metrics file, goes back, and is continued.

Whatever a tracker does, the run ends with the same weights, and its failure is reported once.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import wandb

from healcore.runtime.healer import Healer
from healcore.runtime.trackers import select, trackers
from tests.healer.training_loops import Faults, loop_of, rules, same, train
from tests.runtime.trackers.read_back import NAMES, asked, stored
from tests.tools.report.small_runs import lines_of

EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The working directory; its name is the project in each tracker."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@EACH
def test_what_is_stored(name, folder):
    loop, metrics = loop_of("torch", Faults(once=[13])), folder / "run.metrics.jsonl"
    facts = train(
        loop, rules(), range(20), store=folder / "c", metrics=metrics, trackers=asked(name, folder)
    )
    assert facts["rollbacks"] == 1
    plain = loop_of("torch", Faults(once=[13]))
    train(plain, rules(), range(20))
    assert same(plain.weights(), loop.weights()), "tracking changes nothing"
    assert not [e for e in events(folder) if e["kind"] == "problem"]
    found = stored(name, folder)
    expected = lines_of(metrics)
    if name == "mlflow":  # its own reader sorts by time
        assert sorted(step for step, _ in found.rows) == sorted(e["step"] for e in expected)
    else:
        assert [step for step, _ in found.rows] == [each["step"] for each in expected]
        for (_, row), line in zip(found.rows, expected, strict=True):
            for of in ("loss", "grad_norm", "lr_scale", "skip"):
                assert row[f"heal/{of}"] == pytest.approx(float(line[of]), nan_ok=True), (of, line)
    assert any("rollback" in text and "checkpoint" in text for text in found.texts), found.texts
    if name in ("mlflow", "tensorboard"):  # the others have alerts
        assert any("completed" in text for text in found.texts), found.texts


def events(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "c" / "healcore.events.jsonl")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_restarted_run_is_the_same_run_there(name, folder):
    def end_at_8(healer: Healer, number: int) -> None:
        if number == 8:
            raise KeyError("a program that fails")

    options: Any = {"store": folder / "c", "trackers": asked(name, folder)}
    with pytest.raises(KeyError):
        train(loop_of("torch"), rules(), range(16), before=end_at_8, **options)
    if name == "wandb":
        time.sleep(1.1)  # the folder of an offline run is named by the second in which it begins
    train(loop_of("torch"), rules(), range(16), **options)
    found = stored(name, folder)
    assert found.runs == 1
    assert {step for step, _ in found.rows} == set(range(16))
    if name == "mlflow":
        assert any("resume" in text for text in found.texts)


def test_own_objects_get_everything(folder):
    class Mine:
        def __init__(self):
            self.calls: list[str] = []

        def start(self, run):
            self.calls.append(f"start {run.config['policy']}")

        def metrics(self, step, values):
            self.calls.append(f"step {step}")

        def event(self, event):
            self.calls.append(event["kind"])

        def close(self):
            self.calls.append("close")

    mine = Mine()
    train(loop_of("torch"), rules(), range(3), trackers=mine)
    assert mine.calls[:2] == ["start test", "start"]
    assert [each for each in mine.calls if "step" in each] == ["step 0", "step 1", "step 2"]
    assert mine.calls[-2:] == ["end", "close"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("wandbb", "wandb:PROJECT"),
        ("wandb:", "got 'wandb:'"),
        (3, "got 3"),
        (object, "got <class 'object'>"),
        (["wandb", None], "got None"),
    ],
)
def test_what_is_no_tracker(given, message):
    with pytest.raises(ValueError, match=message):
        select(given)


# -- active runs of the user: they keep their steps and stay open ----------------------------------


def test_a_wandb_run_keeps_its_own_steps(folder):
    run = wandb.init(project=folder.name, settings={"console": "off"})

    def log(healer, number):
        if number in (4, 9):
            run.log({"epoch": number // 5}, step=number // 5)  # W&B refuses it after a higher one

    train(loop_of("torch"), rules(), range(10), before=log, trackers="wandb")
    assert wandb.run is run, "it is still open"
    run.log({"heal/grad_norm": 7.0, "mine": 1.0}, step=5)
    run.finish()
    rows = stored("wandb", folder).rows
    assert [row for _, row in rows][-1] == {"heal/grad_norm": 7.0}
    assert len(rows) <= 4, "rows are the user's"
    assert run.config["healcore"]["policy"] == "test"


# -- failures --------------------------------------------------------------------------------------


def run(folder: Path, **options: Any) -> list[Any]:
    """The weights after a run with a rollback."""
    loop = loop_of("torch", Faults(once=[13]))
    facts = train(loop, rules(), range(20), events=folder / "run.events.jsonl", **options)
    assert (facts["step"], facts["rollbacks"]) == (19, 1), "one bad batch is left out"
    return loop.weights()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[Any]:
    return run(tmp_path_factory.mktemp("plain"))


def cannot_start(name: str, folder: Path, monkeypatch: Any) -> str:
    """What each real client raises for a place that it cannot use."""
    if name == "wandb":
        return f"wandb:{'x' * 200}"
    if name == "trackio":
        monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
        return "trackio"
    if name == "mlflow":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://there")
        return "mlflow"
    (folder / "file").write_text("")
    return f"tensorboard:{folder / 'file'}"


@pytest.mark.parametrize("name", NAMES)
def test_it_cannot_start(name, folder, monkeypatch, undisturbed, capsys):
    weights = run(folder, trackers=cannot_start(name, folder, monkeypatch))
    assert same(weights, undisturbed)
    (problem,) = re.findall(r"tracker (\w+) fails, training continues", capsys.readouterr().err)
    assert problem == name


class Broken:
    """A tracker that is broken from its tenth record on."""

    def __init__(self, fault: Any) -> None:
        self.fault, self.records = fault, 0

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.records += 1
        if self.records >= 10:
            self.fault()

    def event(self, event: Any) -> None:
        pass


def disk_full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("fault", "text"), [(disk_full, "No space left"), (sys.exit, "SystemE")])
def test_it_fails_later(fault, text, folder, undisturbed, capsys):
    assert same(run(folder, trackers=Broken(fault)), undisturbed)
    (problem,) = re.findall("tracker Broken fails.*", capsys.readouterr().err)
    assert text in problem


def test_it_blocks(folder, undisturbed, monkeypatch, capsys):
    """The run does not wait for it, and its end waits for a bounded time."""
    monkeypatch.setattr(trackers, "MAX_WAIT", 0.2)
    released = threading.Event()
    assert same(run(folder, trackers=Broken(released.wait)), undisturbed)
    assert "tracker Broken has not finished within 0.2 s" in capsys.readouterr().err
    released.set()
