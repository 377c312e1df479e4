"""The example fails without healcore; with it, it is rolled back and completes."""

from __future__ import annotations

import math
import re

import pytest

pytest.importorskip("accelerate")

from examples import accelerate_loop

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def test_example(tmp_path, capsys: pytest.CaptureFixture[str]):
    accelerate_loop.main(str(tmp_path))
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks (\d+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.45  # guessing the mean of sin() gives 0.5
    assert int(match[2]) == accelerate_loop.STEPS, "the rate was at fault: no batch is left out"
    assert int(match[3]) >= 1


def test_the_same_loop_without_healcore(tmp_path, monkeypatch, capsys):
    """In `observe` mode the same is decided and nothing is carried out."""
    healer = accelerate_loop.healcore.Healer
    monkeypatch.setattr(
        accelerate_loop.healcore, "Healer", lambda _, **options: healer("observe", **options)
    )
    accelerate_loop.main(str(tmp_path))
    assert math.isnan(float(capsys.readouterr().out.split()[1].rstrip(",")))
