"""One rank of a sharded run that rolls back after a NaN. Run by test_rollback_of_two_ranks.py."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import NAN, ROLLS_BACK, roll_back, single_record


def main(rank: int, rendezvous: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW(net.parameters(), lr=0.01)
    state = {"model": net, "optimizer": optimizer, "scheduler": ExponentialLR(optimizer, 0.9)}
    driver = TorchDriver(state, ROLLS_BACK)
    ranks = driver.ranks()
    assert (ranks.rank, ranks.world) == (rank, 2)
    assert ranks.gather(rank) == [0, 1]
    store = driver.store(folder, ())

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
    store.save(1, driver.items(), healing=driver.healing())
    moved = step(usual)
    while driver.poll_step() is not None:
        pass

    # Only rows of the second rank's half are bad, on the first rank's data: both name the tensor.
    bad = usual.clone()
    bad[3] = NAN if rank == 0 else bad[3]
    step(bad)
    record = single_record(driver)
    assert record.skip
    assert {each.name for each in record.evidence} == {"0.weight", "1.weight"}, record.evidence
    assert all(each.grad_norm != each.grad_norm for each in record.evidence)

    roll_back(driver, store.restore(1, driver.items()))
    again = step(usual)
    for a, b in zip(again, moved, strict=True):
        torch.testing.assert_close(a, 0.5 * b, rtol=1e-4, atol=1e-9)
    store.wait()
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
