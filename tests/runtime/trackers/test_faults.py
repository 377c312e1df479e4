"""Whatever a tracker does, the run ends with the same weights, and the failure is reported once."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.trackers import trackers
from tests.healer.training_loops import Faults, loop_of, rules, same, train
from tests.runtime.trackers.read_back import NAMES


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
