"""One of two ranks whose `loss_fn` fails, or whose clocks differ; prints a JSON line for each case.

python -m tests.torch.failing_comparisons RANK WORLD RENDEZVOUS CASES...
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from healcore.runtime.dominance import dominance, exchange
from healcore.runtime.healer import Healer

SECONDS = 120
"""After which ranks that wait for each other show where, and end."""
WAIT_S = 2.0
STEPS, FAULT = 60, 45
"""Steps of a run, and the step of its fault, after which weights are compared."""


class Clock:
    """Stands still."""

    @staticmethod
    def monotonic() -> float:
        """Always the same time."""
        return 5.0


def run(case: str) -> dict[str, Any]:
    """A run with damage, in which `loss_fn` fails on rank 1 at one of the next comparisons."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model: nn.Module = net
    if case == "gathered":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(net)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    calls, asked_at = 0, -1

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    def loss_fn(step: int) -> Any:
        nonlocal calls, asked_at
        calls, asked_at = calls + 1, done
        if case == "wrong" and rank == 1:
            return torch.ones(2)
        if case in ("raises", "gathered") and rank == 1 and done > FAULT + 3:
            raise ValueError("no such row")
        return loss_of(step)

    done, said = 0, ""
    problems: list[str] = []
    began = time.monotonic()
    dominance.time = Clock if case == "clock" and rank == 1 else time  # type: ignore[assignment]
    healer = Healer(
        "default", state={"model": net, "optimizer": optimizer}, loss_fn=loss_fn, save_every=20,
        console=False,
    )  # fmt: skip
    try:
        with healer:
            loop: Any = healer._loop
            loop.recovery.dominance.warn = problems.append
            for step in healer.batches(list(range(STEPS))):
                if done == FAULT:
                    with torch.no_grad():
                        net[2].weight.mul_(50.0)  # type: ignore[operator, union-attr]
                loss = loss_of(step)
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    taken = time.monotonic() - began
    weights = (
        None
        if case == "gathered"
        else float(sum(p.detach().double().sum() for p in net.parameters()))
    )
    return {"steps": done, "calls": calls, "asked at": asked_at, "said": said, "took": taken,
            "problems": problems, "rank": rank, "weights": weights}  # fmt: skip


def main(rank: int, world: int, rendezvous: str, cases: list[str]) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    exchange.WAIT_S = WAIT_S
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    for case in cases:
        print(json.dumps([case, run(case)]), flush=True)
    if "gathered" not in cases:  # its groups cannot be used any more
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
