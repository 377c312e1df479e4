"""One of two ranks of a sharded run: python -m tests.torch.driver.sharded_run_rank RANK ROOT.

For each optimizer: a run without a restart, and the same with a restart from a store. Prints a JSON
line with digests of both.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD, AdamW, Muon, Optimizer

from healcore.runtime.healer import Healer

STEPS, FIRST = 12, 7


class WideMoment(SGD):
    """Keeps a sum of its gradients in float32, whatever the parameters' dtype."""

    def step(self, closure: Any = None) -> None:
        """Plain descent."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "sum" not in state:
                state["sum"] = torch.zeros_like(p, dtype=torch.float32)
            state["sum"].add_(p.grad)
            p.data.sub_((0.01 * state["sum"]).to(p.dtype))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Without SGD's conversion of moments to the parameter's dtype."""
        for p, i in zip(self.param_groups[0]["params"], state_dict["state"], strict=True):
            self.state[p] = {"sum": state_dict["state"][i]["sum"]}


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "fused AdamW": lambda params: AdamW(params, lr=0.01, fused=True),
    "momentum": lambda params: SGD(params, lr=0.01, momentum=0.9),
    "Muon": lambda params: Muon(params, lr=0.01),
    "bfloat16": lambda params: WideMoment(params),
    "tensor parallel": lambda params: AdamW(params, lr=0.01, foreach=False),
}


def built(name: str) -> tuple[nn.Module, Optimizer]:
    """A fresh sharded model and its optimizer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    if name == "tensor parallel":
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        if name == "bfloat16":
            net.bfloat16()
        fully_shard(net, mesh=mesh)
    return net, OPTIMIZERS[name](net.parameters())


def digests(name: str, store: Path, steps: int) -> str:
    """One process's part of a run; returns a digest of its final state."""
    net, optimizer = built(name)
    state = {"model": net, "optimizer": optimizer}
    rank = 0 if name == "tensor parallel" else dist.get_rank()
    with Healer("default", state=state, store=store, save_every=3, resume=True) as healer:
        for i in healer.batches(list(range(STEPS))):
            random = torch.Generator().manual_seed(10 * i + rank)
            x = torch.randn(8, 4, generator=random).to(next(net.parameters()).dtype)
            loss = (net(x) - x).float().square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i + 1 == steps:
                break
    held = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in held if torch.is_tensor(t)]
    data = b"".join(t.detach().float().numpy().tobytes() for t in parts)
    return hashlib.sha256(data).hexdigest()


def main(rank: int, root: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2
    )
    for name in OPTIMIZERS:
        whole = digests(name, root / name / "whole", STEPS)
        digests(name, root / name / "parts", FIRST)
        print(json.dumps([whole, digests(name, root / name / "parts", STEPS)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
