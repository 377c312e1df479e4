"""One of two ranks with a TieredStore each. Arguments: rank, directory."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from healcore.runtime.store import CheckpointDamaged, StateMismatch, restore_first_intact
from healcore.torch.store import DCPStore, Keep, MemoryStore, TieredStore

faulthandler.dump_traceback_later(60, exit=True)  # a rank that waits for the other shows where
rank, root = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
ODD = 1


def fresh(scale):
    whole = torch.arange(24.0).reshape(6, 4) * scale
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    return {"model": {"sharded": sharded, "plain": whole.clone()}}


def flip(step):
    if rank == ODD:
        with tiers.memory.reading(step) as copy:
            next(iter(copy.snapshot.blocks())).raw[3] ^= 1


def check(state, scale):
    whole = torch.arange(24.0).reshape(6, 4) * scale
    assert torch.equal(state["model"]["sharded"].full_tensor(), whole), scale
    assert torch.equal(state["model"]["plain"], whole), scale


def raised(kind, action):
    try:
        action()
    except kind as error:
        return error
    raise SystemExit(f"{kind.__name__} was not raised")


tiers = TieredStore(MemoryStore(Keep(good=3, candidates=9)), DCPStore(root / "store"))
for step in range(1, 8):
    tiers.save(step, fresh(step))
tiers.wait()

# Restored from disk on both, and gone from the memory of both.
flip(1)
check(tiers.restore(1, fresh(0)).state, 1)
assert 1 not in [saved.step for saved in tiers.memory.steps()]
assert any("memory" in str(each) for each in tiers.trouble())

flip(2)
assert tiers.verify(2).step == 2
assert 2 not in [saved.step for saved in tiers.memory.steps()]
check(tiers.restore(2, fresh(0)).state, 2)

# Lost by one of them.
if rank == ODD:
    tiers.memory.delete(3)
assert tiers.verify(3).step == 3
check(tiers.restore(3, fresh(0)).state, 3)
tiers.commit(3, {"attempts": [0], "proven": 3})
assert tiers.healings()[3] == {"attempts": [0], "proven": 3}

# Damaged in one memory, and the live state of the other rank does not fit.
flip(4)
live = fresh(0)
if rank != ODD:
    live["model"]["plain"] = torch.zeros(5)
assert "plain" in str(raised(StateMismatch, lambda: tiers.restore(4, live)))
check(tiers.restore(4, fresh(0)).state, 4)

# Of two meanings of the same step, or none at all.
flip(5)
if rank == 0:
    path = next((root / "store").glob("step-0000000005.*")) / "data" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(bytes(data))
dist.barrier()
assert raised(CheckpointDamaged, lambda: tiers.restore(5, fresh(0))).step == 5
found = restore_first_intact(tiers, [5, 6], fresh(0), lambda error: None)
assert found.step == 6
check(found.restored.state, 6)

# A NaN of one rank, found before anything is saved.
bad = fresh(8)
if rank == ODD:
    bad["model"]["plain"][0, 0] = float("nan")
for store in (tiers, tiers.disk):
    assert store.nonfinite_in(bad) == ("model.plain",)

# Another error than the stores' own.
copier: Any = tiers.memory.copier
give = copier.restore
if rank == ODD:

    def broken(*arguments):
        raise MemoryError("no room")

    copier.restore = broken
error = raised(Exception, lambda: tiers.restore(7, fresh(0)))
assert "no room" in str(error), error
copier.restore = give
check(tiers.restore(7, fresh(0)).state, 7)

dist.barrier()
dist.destroy_process_group()
print("fine")
