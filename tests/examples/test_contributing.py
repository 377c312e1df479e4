"""The two recipes of CONTRIBUTING.md work as they are written."""

import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

import healcore
from tests.forked_programs import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    """The code below a heading, in one language."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.M | re.S)


def with_lines(text: str, diff: str) -> str:
    """A text with each line that begins with "+" after the line that stands before it."""
    before = ""
    for line in diff.splitlines(keepends=True):
        if line[0] == "+":
            assert text.count(before) == 1, before
            text = text.replace(before, before + line[1:])
        else:
            before = line[1:]
    return text


def test_a_detector_is_a_file_and_two_lines(tmp_path):
    for folder in ("healcore", "adapters", "policies"):
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=without)
    detectors = tmp_path / "healcore/core/detectors"
    detector, program = blocks("Add a detector", "python")
    (diff,) = blocks("Add a detector", "diff")
    (detectors / "jump.py").write_text(detector)
    names = detectors / "__init__.py"
    names.write_text(with_lines(names.read_text(), diff))

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.stdout, done.stderr) == ("skipped 15\n", "")


class Trainer:
    """A trainer with a loop of its own, whose weights become NaN once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        x = torch.randn(2400, 8)
        self.loader: Any = list(zip(x.split(8), x.sum(1, keepdim=True).split(8), strict=True))
        self.steps = 0

    def compute_loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def fit(self) -> None:
        for batch in self.loader:
            if self.steps == 150:
                torch.nn.init.constant_(self.model.weight, torch.nan)
            self.steps += 1
            self.optimizer.zero_grad()
            self.compute_loss(batch).backward()
            self.optimizer.step()


@pytest.mark.parametrize("healed", [False, True])
def test_a_trainer_is_healed_by_twenty_lines(healed, tmp_path):
    names: dict[str, Any] = {}
    (code,) = blocks("Add a trainer", "python")
    exec(code, names)
    trainer = Trainer()
    loader = trainer.loader

    if not healed:
        trainer.fit()
        assert trainer.model.weight.isnan().all()
        return
    checkpoints = healcore.Checkpoints(every=20)
    hook = names["MyCallback"]("default", {"store": tmp_path, "checkpoints": checkpoints})
    hook.train(trainer)

    assert hook.healer.rollbacks == 1
    assert hook.healer.step == len(loader) == 300
    assert trainer.loader is loader
    assert trainer.compute_loss(loader[0]) < 0.1
