"""The examples with Lightning fail without healcore; with it, they are rolled back and complete."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

pytest.importorskip("lightning")

from examples import fabric_loop, lightning_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
TRAINER_STEPS = lightning_trainer.EPOCHS * lightning_trainer.BATCHES


@pytest.mark.parametrize(
    ("example", "steps", "best"),
    [(lightning_trainer, TRAINER_STEPS, 0.45), (fabric_loop, fabric_loop.STEPS, 0.7)],
)
def test_example(example: Any, steps: int, best: float, tmp_path: Any, capsys: Any):
    example.main(str(tmp_path))
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks (\d+)\n", capsys.readouterr().out)
    assert match
    # Guessing the mean of sin() gives 0.5, on a single batch up to 0.7.
    assert float(match[1]) < best
    assert int(match[2]) == steps, "the rate was at fault: no batch is left out"
    assert int(match[3]) >= 1


@pytest.mark.parametrize("example", [lightning_trainer, fabric_loop])
def test_the_same_without_healcore(example: Any, tmp_path: Any, monkeypatch: Any, capsys: Any):
    """In `observe` mode the same is decided and nothing is carried out."""
    owner, name = (
        (example, "LightningHealingCallback")
        if example is lightning_trainer
        else (example.healcore, "Healer")
    )
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda _, **options: original("observe", **options))
    example.main(str(tmp_path))
    assert math.isnan(float(capsys.readouterr().out.split()[1].rstrip(",")))
