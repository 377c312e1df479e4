"""Several devices, several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from healcore.jax.store import Keep, MemoryStore, OrbaxStore, TieredStore
from healcore.jax.store.host_copy import JaxCopier
from healcore.runtime.store import memory

root, KEEP = Path(sys.argv[1]), Keep(quarantined=1)
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
def put(value, *spec): return jax.device_put(value, NamedSharding(mesh, P(*spec)))
def fresh():
    return {
        "both": put(jnp.arange(64.0).reshape(8, 8), "x", "y"),
        "rows": put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), "x"),
        "columns": put(jnp.arange(64.0).reshape(8, 8), None, "y"),
        "everywhere": put(jnp.arange(5.0)),
        "scalar": put(jnp.float32(2.5)),
        "one device": jax.device_put(jnp.arange(3), jax.devices()[5]),
        "key": jax.random.wrap_key_data(put(jnp.arange(2, dtype=jnp.uint32))),
    }
spoil = jax.jit(lambda leaf: leaf * 0 + 7, donate_argnums=0)
def data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
stores = {
    "orbax": OrbaxStore(root / "orbax"),
    "memory": MemoryStore(KEEP),
    "pinned": memory.MemoryStore(JaxCopier(pinned=True), KEEP),
    "tiers": TieredStore(MemoryStore(KEEP), OrbaxStore(root / "tiers")),
}
for name, store in stores.items():
    state = fresh()
    store.save(1, {"x": state})
    for key, leaf in state.items():
        if key != "key":
            jax.block_until_ready(spoil(leaf))
    store.wait()
    store.verify(1)
    if name == "memory":
        # Of replicas one is copied. (Every part is rounded up to 64 bytes.)
        assert store.steps()[0].bytes < 1500, store.steps()
    like = fresh()
    for _ in range(2):
        found = store.restore(1, {"x": like}).state["x"]
        for key, leaf in fresh().items():
            assert found[key].sharding == leaf.sharding, (name, key, found[key].sharding)
            assert (data(found[key]) == data(leaf)).all(), (name, key)
            if key != "key":  # donating what was restored reaches neither store nor replicas
                jax.block_until_ready(spoil(found[key]))
        store.verify(1)
    # Into another sharding.
    other = {"x": {**fresh(), "rows": put(jnp.zeros((8, 8), jnp.bfloat16), None, "x")}}
    found = store.restore(1, other).state["x"]["rows"]
    assert found.sharding == other["x"]["rows"].sharding
    assert (np.asarray(found) == np.asarray(fresh()["rows"])).all()
    bad = fresh()
    bad["both"] = put(jnp.ones((8, 8)).at[7, 7].set(jnp.inf), "x", "y")
    store.save(2, {"x": bad})
    store.wait()
    assert store.steps()[-1].nonfinite == ("x.both",), store.steps()
print("fine")
"""

RANKS = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from healcore.runtime.store import (
    CheckpointDamaged, Keep, NotFinite, SaveFailed, StateMismatch, prune,
)
from healcore.torch.store import DCPStore, MemoryStore, TieredStore, apply

rank, root = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

class Own:
    per_rank = True
    def __init__(self): self.value = None
    def state_dict(self): return {"rng": torch.full((3,), float(rank)), "rank": rank}
    def load_state_dict(self, state): self.value = state

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
store.mark(1, "good"); store.mark(2, "good")
prune(store, Keep(good=1, candidates=2))
dist.barrier()
assert [(s.step, s.status) for s in store.steps()] == [(2, "good"), (3, "candidate")]

# A NaN in the part of one rank is known to both.
bad = fresh(4.0)
if rank == 1:
    bad["model"]["sharded"].to_local()[0, 0] = float("nan")
store.save(4, bad, healing={"step": 4}); store.wait()
dist.barrier()
assert not store.steps()[-1].finite
try:
    store.mark(4, "good")
    raise SystemExit("marked")
except NotFinite:
    pass

# One rank cannot write: all fail together, and go on.
original = DCPStore._write_structure
if rank == 1:
    def broken(self, entries, folder): raise OSError(28, "No space left on device")
    DCPStore._write_structure = broken
store.save(5, fresh(5.0), healing={"step": 5})
try:
    store.wait()
    raise SystemExit("saved")
except SaveFailed as error:
    assert "No space left" in str(error), error
DCPStore._write_structure = original
store.save(6, fresh(6.0), healing={"step": 6}); store.wait()
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
try:
    store.restore(6, live)
    raise SystemExit("restored")
except StateMismatch as error:
    assert "plain" in str(error), error

# Damage in a file that only one of them looks at is known to both.
dist.barrier()
folder = Path(store.steps()[-1].path)
if rank == 0:
    for name in ("data/__1_0.distcp", "data/__0_0.distcp"):
        path = folder / name
        data = bytearray(path.read_bytes()); data[100] ^= 4; path.write_bytes(bytes(data))
        break
dist.barrier()
try:
    store.restore(6, fresh())
    raise SystemExit("restored")
except CheckpointDamaged as error:
    assert error.file == "data/__1_0.distcp"

memory = MemoryStore()
memory.save(1, fresh(1.0), healing={"step": 1}); memory.wait()
check(memory, 1, 1.0)
tiers = TieredStore(MemoryStore(), DCPStore(root / "tiers"))
tiers.save(7, fresh(7.0), healing={"step": 7}); tiers.wait()
check(tiers, 7, 7.0)
tiers.memory.drop(7)
check(tiers, 7, 7.0)
dist.barrier()
dist.destroy_process_group()
print("fine")
"""

ALONE = """
import sys
from pathlib import Path
import torch
from healcore.runtime.store import StateMismatch
from healcore.torch.store import DCPStore
store = DCPStore(Path(sys.argv[1]) / "disk")
like = {"model": {name: torch.zeros(6, 4) for name in ("sharded", "replicated", "plain")}}
found = store.restore(3, like).state["model"]
for name, tensor in found.items():
    assert torch.equal(tensor, torch.arange(24.0).reshape(6, 4) * 3), name
print("fine")
"""


def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen) -> None:
    ends = [process.communicate(timeout=600) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-4000:]
        assert out.splitlines()[-1] == "fine"


def test_sharded_arrays_on_eight_devices(tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    finish(start(SHARDED, tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))


def test_two_ranks_save_one_checkpoint(tmp_path):
    finish(*(start(RANKS, rank, tmp_path) for rank in (0, 1)))
    # One process reads what two have written.
    finish(start(ALONE, tmp_path))
