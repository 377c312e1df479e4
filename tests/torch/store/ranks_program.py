"""Two ranks save into one DCPStore; then one process reads. Arguments: rank or -1, directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from healcore.runtime.store import (
    CheckpointDamaged,
    Keep,
    SaveFailed,
    StateMismatch,
    files,
    superfluous,
)
from healcore.torch.store import DCPStore, MemoryStore, apply
from tests.runtime.store.disk_faults import flip
from tests.runtime.store.store_cases import forget

rank, root = int(sys.argv[1]), Path(sys.argv[2])
if rank < 0:
    like = {"model": {name: torch.zeros(6, 4) for name in ("sharded", "replicated", "plain")}}
    for name, tensor in DCPStore(root / "disk").restore(3, like).state["model"].items():
        assert torch.equal(tensor, torch.arange(24.0).reshape(6, 4) * 3), name
    print("fine")
    sys.exit()
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


class Own:
    per_rank = True

    def __init__(self):
        self.value = None

    def state_dict(self):
        return {"rng": torch.full((3,), float(rank)), "rank": rank}

    def load_state_dict(self, state):
        self.value = state


def fresh(scale=1.0):
    whole = torch.arange(24.0).reshape(6, 4) * scale
    return {
        "model": {
            "sharded": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
            "replicated": distribute_tensor(whole.clone(), mesh, [Replicate()]),
            "plain": whole.clone(),
        },
        "own": Own(),
    }


def check(store, step, scale):
    live = fresh(0.0)
    found = store.restore(step, live)
    whole = torch.arange(24.0).reshape(6, 4) * scale
    model = found.state["model"]
    assert torch.equal(model["sharded"].to_local(), whole.chunk(2)[rank]), model
    assert model["sharded"].placements == (Shard(0),)
    assert torch.equal(model["sharded"].full_tensor(), whole)
    assert torch.equal(model["replicated"].to_local(), whole)
    assert torch.equal(model["plain"], whole)
    assert found.state["own"]["rank"] == rank
    assert found.state["own"]["rng"].tolist() == [rank] * 3
    assert found.healing == {"step": step}
    apply(live, found.state)
    assert torch.equal(live["model"]["sharded"].full_tensor(), whole)
    assert live["own"].value["rank"] == rank


store = DCPStore(root / "disk")
for step in (1, 2, 3):
    state = fresh(step)
    store.save(step, state, healing={"step": step})
    state["model"]["plain"].zero_()
    state["model"]["sharded"].zero_()
store.wait()
for step in (1, 2, 3):
    store.verify(step)
    check(store, step, step)
store.commit(2, {"attempts": [0], "proven": 2})
for step in superfluous(store.steps(), Keep(good=1, candidates=2)):
    store.delete(step)
dist.barrier()
assert [(s.step, s.status) for s in store.steps()] == [(2, "good"), (3, "candidate")]

# A NaN in the part of one rank is known to both.
bad = fresh(4.0)
if rank == 1:
    bad["model"]["sharded"].to_local()[0, 0] = float("nan")
store.save(4, bad, healing={"step": 4})
store.wait()
dist.barrier()
assert not store.steps()[-1].finite

# One rank cannot write: all fail together, and go on.
original = files.write_new
if rank == 1:

    def broken(path, data):
        raise OSError(28, "No space left on device")

    files.write_new = broken
store.save(5, fresh(5.0), healing={"step": 5})
with pytest.raises(SaveFailed, match="No space left"):
    store.wait()
files.write_new = original
store.save(6, fresh(6.0), healing={"step": 6})
store.wait()
check(store, 6, 6.0)
dist.barrier()
assert not [name for name in os.listdir(root / "disk") if name.startswith(".tmp")]


# A live state that does not fit on one rank is known to both; what is optional is left out.
class Newcomer(Own):
    optional = True


live = {**fresh(), "healcore": Newcomer()}
assert set(store.restore(6, live).state) == {"model", "own"}
if rank == 1:
    live["model"]["plain"] = torch.zeros(5)
with pytest.raises(StateMismatch, match="plain"):
    store.restore(6, live)

# Damage in a file that only one of them looks at is known to both.
dist.barrier()
folder = Path(store.steps()[-1].path or "")
if rank == 0:
    flip(folder / "data/__1_0.distcp", 802)
dist.barrier()
with pytest.raises(CheckpointDamaged) as error:
    store.restore(6, fresh())
assert error.value.file == "data/__1_0.distcp"

memory = MemoryStore()
memory.save(1, fresh(1.0), healing={"step": 1})
memory.wait()
check(memory, 1, 1.0)
tiers = DCPStore(root / "tiers", in_memory=Keep())
tiers.save(7, fresh(7.0), healing={"step": 7})
tiers.wait()
check(tiers, 7, 7.0)
forget(tiers)
check(tiers, 7, 7.0)
dist.barrier()
print("fine", flush=True)
os._exit(0)  # torch 2.7: destroying a group can wait for a thread that waits for the interpreter
