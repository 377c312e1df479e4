"""One of two ranks of a sharded run: restarts with each of `OPTIMIZERS`, and a rollback."""

from __future__ import annotations

import hashlib
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
from torch.optim.lr_scheduler import ExponentialLR

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import NAN, ROLLS_BACK, roll_back, single_record
from tests.torch.worlds import folder, serve

STEPS, FIRST = 12, 7
ROLLBACK = "rollback"


class WideMoment(SGD):
    """Keeps a sum of its gradients in float32, for parameters of any dtype."""

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
    with Healer(
        "default", state=state, store=store, checkpoints=Checkpoints(every=3), resume=True
    ) as healer:
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


def rolled_back() -> bool:
    """Both ranks decide the same about a NaN, and return to the same checkpoint."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW(net.parameters(), lr=0.01)
    state = {"model": net, "optimizer": optimizer, "scheduler": ExponentialLR(optimizer, 0.9)}
    driver = TorchDriver(state, ROLLS_BACK)
    ranks = driver.ranks()
    rank = dist.get_rank()
    assert (ranks.rank, ranks.world) == (rank, 2)
    assert ranks.gather(rank) == [0, 1]
    store = driver.store(folder() / "rollback")

    def step(target: torch.Tensor) -> list[torch.Tensor]:
        before = local()
        loss = (net(torch.ones(1, 4)) * target).sum()
        loss.backward()
        assert not driver.may_save()
        optimizer.step()
        state["scheduler"].step()
        optimizer.zero_grad()
        assert driver.may_save()
        return [a - b for a, b in zip(local(), before, strict=True)]

    def local() -> list[torch.Tensor]:
        return [p.detach().to_local().clone() for p in net.parameters()]  # type: ignore[attr-defined]

    usual = torch.tensor([1.0, 0.5, -1.0, 2.0])
    step(usual)
    store.save(1, driver.state(), healing=driver.engines())
    moved = step(usual)
    while driver.steps() is not None:
        pass

    # Only rows of the second rank's half are bad, on the first rank's data: both name the tensor.
    bad = usual.clone()
    bad[3] = NAN if rank == 0 else bad[3]
    step(bad)
    record = single_record(driver)
    assert record.skip
    assert {each.name for each in record.evidence} == {"0.weight", "1.weight"}, record.evidence
    assert all(each.grad_norm != each.grad_norm for each in record.evidence)

    roll_back(driver, store.restore(1, driver.state()))
    again = step(usual)
    for a, b in zip(again, moved, strict=True):
        torch.testing.assert_close(a, 0.5 * b, rtol=1e-4, atol=1e-9)
    store.wait()
    return True


def outcome(case: str) -> Any:
    """True for the rollback; else digests of a run without a restart, and with a restart."""
    if case == ROLLBACK:
        return rolled_back()
    root = folder() / case
    whole = digests(case, root / "whole", STEPS)
    digests(case, root / "parts", FIRST)
    return [whole, digests(case, root / "parts", STEPS)]


if __name__ == "__main__":
    serve(outcome, seconds=600, cases=(*OPTIMIZERS, ROLLBACK))
