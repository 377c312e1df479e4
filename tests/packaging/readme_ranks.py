"""The README's torch snippet, unchanged, on two ranks.

    python -m tests.packaging.readme_ranks ROOT

Forks the ranks, as torchrun would start them. Each trains on data of its own, and rank 1 alone gets
batches that are NaN. Prints a JSON line for each run: what every rank reports.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, DistributedSampler

from tests.healer.elastic_runs import run_ranks
from tests.packaging.test_readme import TORCH, snippet

ROWS, BAD = 64, (9, 13)
"""Rows of the data set, and those that are NaN: odd, so that rank 1 gets them."""


def trained(part: str) -> dict[str, Any]:
    """Runs the snippet with that text in it, of a program as its reader has one."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    rows[list(BAD)] = torch.nan
    sampler = DistributedSampler(rows, shuffle=False)  # type: ignore[arg-type]
    net = torch.nn.Linear(3, 1, bias=False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scope: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": ConstantLR(optimizer),
        "loss_fn": lambda model, batch: (model(batch) - 1).square().mean(),
        "loader": DataLoader(rows, batch_size=2, sampler=sampler),  # type: ignore[arg-type]
    }
    before = net.weight.detach().clone()
    exec(snippet(part), scope)
    assert not torch.equal(net.weight, before)
    moments = [m for s in optimizer.state.values() for m in s.values()]
    return {
        "rank": rank,
        "weights": net.weight.tolist(),
        "moments": [m.tolist() for m in moments],
        "steps": int(moments[0]),
    }


def main(root: Path) -> None:
    """Runs the snippet twice; the second run has nothing to do."""
    importlib.import_module("torch._dynamo")  # the first step would, in every rank
    os.chdir(root)
    for part in (TORCH, TORCH):

        def target(part: str = part) -> None:
            found = trained(part)
            (root / f"found-{found.pop('rank')}").write_text(json.dumps(found))

        ended = run_ranks(root, 2, target)
        found = [path.read_text() for path in sorted(root.glob("found-*"))]
        for path in root.glob("found-*"):
            path.unlink()
        saved = sorted({int(path.name[5:15]) for path in root.glob("checkpoints/step-*")})
        report = {"statuses": ended.statuses, "ranks": [*map(json.loads, found)], "saved": saved}
        print(json.dumps({**report, "errors": ended.errors}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
