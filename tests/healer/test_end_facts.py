"""What the last line and the postmortem of a run say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from healcore import Healer
from tests.healer.run_directory import postmortems


def run(folder: Path, *, limit: int = 99) -> None:
    """Twelve steps of a regression, with batches of eight rows of four numbers."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    rows = [torch.full((8, 4), float(i)) for i in range(12)]
    clip: Any = {"kind": "fixed", "max_norm": 1e-3}
    with Healer("default", state=state, store=folder, clip=clip) as healer:
        for batch in healer.batches(rows):
            if healer.step >= limit:
                break
            for part in healer.microbatches(batch):
                with part:
                    if len(part.batch) > 4 and limit == 50:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
                    loss = model(part.batch).square().mean()
                    healer.observe(loss)
                    (loss * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_postmortem_has_the_last_metrics_and_the_clips(tmp_path: Path):
    run(tmp_path)
    (found,) = postmortems(tmp_path)
    assert found["clips"] == found["metrics"]["heal/clips"] > 5
    assert found["skips"] == 0
    assert found["metrics"]["heal/loss"] > 0
    assert f"clipped {found['clips']} steps" in " ".join(found["diagnosis"].split())


def test_batches_that_were_split_are_an_intervention(tmp_path: Path, capsys: Any):
    run(tmp_path, limit=50)
    end = capsys.readouterr().err.splitlines()[-1]
    assert "split the batch 1 time when memory ran out" in end
    assert "no intervention" not in end
