"""Whatever a tracker does, the run ends with the same weights, and the failure is reported once."""

from __future__ import annotations

import errno
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.trackers import delivery, selection
from tests.healer.training_loops import Faults, loop_of, rules, same, train
from tests.runtime.trackers.read_back import NAMES, asked

EACH = pytest.mark.parametrize("name", NAMES)


def run(folder: Path, **options: Any) -> list[Any]:
    """The weights after a run with a rollback."""
    loop = loop_of("torch", Faults(once=[13]))
    facts = train(loop, rules(), range(20), events=folder / "run.events.jsonl", **options)
    assert (facts["step"], facts["rollbacks"]) == (19, 1), "one bad batch is left out"
    return loop.weights()


def problems(capsys: Any) -> list[str]:
    """The failures on the console, where those of a run of a few milliseconds are."""
    return re.findall("tracker .* fails, training continues: .*", capsys.readouterr().err)


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


@EACH
def test_it_cannot_start(name, folder, monkeypatch, undisturbed, capsys):
    weights = run(folder, trackers=cannot_start(name, folder, monkeypatch))
    assert same(weights, undisturbed)
    (problem,) = problems(capsys)
    assert problem.startswith(f"tracker {name} ")


class Broken:
    """A real client that is broken from its tenth record on."""

    def __init__(self, client: Any, fault: Any) -> None:
        self.client, self.fault, self.records = client, fault, 0
        self.flush = getattr(client, "flush", lambda: None)
        self.close = getattr(client, "close", lambda: None)
        self.start = getattr(client, "start", lambda run: None)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.records += 1
        if self.records >= 10:
            self.fault()
        self.client.metrics(step, values)

    def event(self, event: Any) -> None:
        self.client.event(event)


@pytest.fixture
def broken(monkeypatch):
    opened = selection._open

    def use(fault: Any) -> None:
        monkeypatch.setattr(selection, "_open", lambda *which: Broken(opened(*which), fault))

    return use


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def exits() -> None:
    sys.exit(3)


@EACH
@pytest.mark.parametrize(("fault", "text"), [(disk_full, "No space left"), (exits, "SystemExit")])
def test_it_fails_later(name, fault, text, folder, broken, undisturbed, capsys):
    broken(fault)
    assert same(run(folder, trackers=asked(name, folder)), undisturbed)
    err = capsys.readouterr().err
    (problem,) = re.findall(f"tracker {name} fails.*", err)
    assert text in problem


@EACH
def test_it_blocks(name, folder, broken, undisturbed, monkeypatch, capsys):
    """The run does not wait for it, and its end waits for a bounded time."""
    monkeypatch.setattr(delivery, "MAX_WAIT", 0.2)
    released = threading.Event()
    broken(released.wait)
    assert same(run(folder, trackers=asked(name, folder)), undisturbed)
    assert f"tracker {name} has not finished within 0.2 s" in capsys.readouterr().err
    released.set()
