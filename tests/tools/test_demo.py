"""The demo end to end: real training in both frameworks, its lines, its report, its events."""

import math
from pathlib import Path

import pytest

from healcore import events
from healcore.tools.cli import _new_folder
from healcore.tools.demo import HIGH_RATES, NAN_BATCH, run_demo

pytestmark = pytest.mark.slow  # about our own demo


def test_the_watched_runs_end_with_nan_and_the_healed_runs_do_not(tmp_path, capsys):
    losses = run_demo(tmp_path / "demo")
    assert list(losses) == ["torch-watched", "torch-healed", "jax-watched", "jax-healed"]
    for framework in ("torch", "jax"):
        assert math.isnan(losses[f"{framework}-watched"])
        assert losses[f"{framework}-healed"] < 0.2
        history = events.read(tmp_path / "demo" / f"{framework}-healed" / "healcore.events.jsonl")
        skipped = [each["step"] for each in history.events if each["kind"] == "alarm"]
        assert skipped[0] == NAN_BATCH
        (rollback,) = [each for each in history.events if each["kind"] == "rollback"]
        assert rollback["checkpoint"] <= HIGH_RATES[0]
    *_, page, folder = capsys.readouterr().out.splitlines()
    assert "<svg" in Path(page.removeprefix("open in a browser: ")).read_text()
    assert folder == f"events and checkpoints: {tmp_path / 'demo'}"


def test_a_second_demo_takes_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _new_folder("healcore-demo") == Path("healcore-demo")
    Path("healcore-demo").mkdir()
    Path("healcore-demo-2").touch()
    assert _new_folder("healcore-demo") == Path("healcore-demo-3")
