"""The example fails without healcore; with it, it is rolled back once and completes."""

from __future__ import annotations

import math
import re

import pytest

from examples import torch_healer


def test_example(tmp_path, capsys: pytest.CaptureFixture[str]):
    torch_healer.main(str(tmp_path))
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks (\d+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.45  # guessing the mean of sin() gives 0.5
    assert int(match[2]) == torch_healer.STEPS, "the rate was at fault: no batch is left out"
    assert int(match[3]) == 1


def test_the_same_loop_without_healcore(tmp_path, monkeypatch, capsys):
    """In `observe` mode the same is decided and nothing is carried out."""
    healer = torch_healer.healcore.Healer
    monkeypatch.setattr(
        torch_healer.healcore, "Healer", lambda _, **options: healer("observe", **options)
    )
    torch_healer.main(str(tmp_path))
    assert math.isnan(float(capsys.readouterr().out.split()[1].rstrip(",")))
