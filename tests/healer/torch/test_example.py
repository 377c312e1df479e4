"""The example goes back once, and has lost the bad batches and nothing else."""

from __future__ import annotations

import re

import pytest

from examples import torch_healer


def test_example(tmp_path, capsys: pytest.CaptureFixture[str]):
    torch_healer.main(str(tmp_path))
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks (\d+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.3  # guessing the mean of sin() gives 0.5
    lost = torch_healer.STEPS - int(match[2])
    assert 10 <= lost <= len(torch_healer.RUINED)
    assert int(match[3]) == 1
