"""One of two ranks that save into one store, in each of `CASES`."""

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from healcore.runtime.store.array_format import SMALL_FILE as FILE
from healcore.runtime.store.checkpoints import (
    BUFFERS_ITEM,
    CheckpointDamaged,
    Keep,
    SaveFailed,
    StateMismatch,
    superfluous,
)
from healcore.runtime.store.ranks import Alone
from healcore.torch.driver import TorchDriver
from healcore.torch.store import DCPStore, MemoryStore, apply
from tests.runtime.store.disk_faults import flip
from tests.runtime.store.store_cases import forget
from tests.torch.forked_ranks import folder, serve


class Own:
    """Each rank has a value of its own."""

    per_rank = True

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.full((3,), float(dist.get_rank())), "rank": dist.get_rank()}

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Newcomer(Own):
    optional = True


def whole(scale: float) -> Tensor:
    return torch.arange(24.0).reshape(6, 4) * scale


def fresh(scale: float = 1.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = {
        "sharded": distribute_tensor(whole(scale), mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole(scale), mesh, [Replicate()]),
        "plain": whole(scale),
    }
    return {"model": model, "own": Own()}


def save(store: Any, step: int, state: Any = None) -> None:
    """Saves; then overwrites what it has saved."""
    state = state or fresh(step)
    store.save(step, state, record={"step": step})
    state["model"]["plain"].zero_()
    state["model"]["sharded"].zero_()
    store.wait()
    dist.barrier()


def check(store: Any, step: int) -> None:
    live = fresh(0.0)
    rank = dist.get_rank()
    found = store.restore(step, live)
    model = found.state["model"]
    assert torch.equal(model["sharded"].to_local(), whole(step).chunk(2)[rank]), model
    assert model["sharded"].placements == (Shard(0),)
    assert torch.equal(model["replicated"].to_local(), whole(step))
    assert torch.equal(model["plain"], whole(step))
    assert found.state["own"]["rng"].tolist() == [rank] * 3
    assert found.record == {"step": step}
    apply(live, found.state)
    assert torch.equal(live["model"]["sharded"].full_tensor(), whole(step))
    assert live["own"].value["rank"] == rank


def kept(root: Path) -> None:
    store = DCPStore(root)
    for step in (1, 2, 3):
        save(store, step)
    for step in (1, 2, 3):
        store.verify(step)
        check(store, step)
    store.replace_record(2, {"attempts": [0], "known_good_up_to": 2})
    surplus = superfluous(store.checkpoints(), Keep(good=1, candidates=2))
    dist.barrier()
    for step in surplus:
        store.delete(step)
    dist.barrier()
    assert [(s.step, s.status) for s in store.checkpoints()] == [(2, "good"), (3, "candidate")]


def saved_by_one_process(root: Path) -> None:
    """Both ranks read the only file of a small checkpoint, each its part."""
    if dist.get_rank() == 0:
        alone = DCPStore(root, ranks=Alone())
        alone.save(5, {"model": dict.fromkeys(("sharded", "replicated", "plain"), whole(5))})
        alone.wait()
    dist.barrier()
    store = DCPStore(root)
    live = {"model": fresh(0.0)["model"]}
    store.verify(5)
    model = store.restore(5, live).state["model"]
    assert torch.equal(model["sharded"].to_local(), whole(5).chunk(2)[dist.get_rank()])
    assert torch.equal(model["replicated"].to_local(), whole(5))
    assert torch.equal(model["plain"], whole(5))
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(store.checkpoints()[0].path or "") / "data" / FILE
        flip(path, 8 * path.stat().st_size - 1)
    dist.barrier()
    with pytest.raises(CheckpointDamaged):
        store.restore(5, live)


def in_memory(root: Path) -> None:
    memory = MemoryStore()
    tiers = DCPStore(root, in_memory=Keep())
    for store in (memory, tiers):
        save(store, 7)
        check(store, 7)
    forget(tiers)
    check(tiers, 7)


def with_nan(root: Path) -> None:
    """A NaN in the part of one rank is known to both."""
    store = DCPStore(root)
    bad = fresh(4.0)
    if dist.get_rank() == 1:
        bad["model"]["sharded"].to_local()[0, 0] = float("nan")
    save(store, 4, bad)
    assert not store.checkpoints()[-1].finite


def one_cannot_write(root: Path) -> None:
    """Both fail together, and go on."""
    store = DCPStore(root)

    def broken(writer: Any, *plan: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", broken)
        with pytest.raises(SaveFailed, match="No space left"):
            save(store, 5)
    save(store, 6)
    check(store, 6)
    dist.barrier()
    assert not [name for name in os.listdir(root) if name.startswith(".tmp")]


def another_state(root: Path) -> None:
    """A live state that does not fit on one rank is known to both; optional parts may lack."""
    store = DCPStore(root)
    live = {**fresh(), "healcore": Newcomer()}
    save(store, 6)
    assert set(store.restore(6, live).state) == {"model", "own"}
    if dist.get_rank() == 1:
        live["model"]["plain"] = torch.zeros(5)
    with pytest.raises(StateMismatch, match="plain"):
        store.restore(6, live)


def damaged(root: Path) -> None:
    """Damage in a file that only one of them looks at is known to both."""
    store = DCPStore(root)
    save(store, 6)
    if dist.get_rank() == 0:
        flip(Path(store.checkpoints()[-1].path or "") / "data/__1_0.distcp", 802)
    dist.barrier()
    with pytest.raises(CheckpointDamaged) as error:
        store.restore(6, fresh())
    assert error.value.file == "data/__1_0.distcp"


def several(root: Path) -> None:
    """Two directories: one rank cannot write to the first; later the second is damaged."""
    roots = [root / name for name in ("first", "second")]
    store = DCPStore(roots)
    write = FileSystemWriter.write_data

    def broken(writer: Any, *plan: Any) -> Any:
        if roots[0] in Path(writer.path).parents:
            raise OSError(28, "No space left on device")
        return write(writer, *plan)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", broken)
        store.save(3, fresh(3.0), record={"step": 3})
        with pytest.raises(SaveFailed, match=r"No space left.*second has this checkpoint"):
            store.wait()
    dist.barrier()
    check(store, 3)
    assert [len(DCPStore(each).checkpoints()) for each in roots] == [0, 1]
    save(store, 3)
    if dist.get_rank() == 0:
        flip(next(roots[0].glob("step-*/data/__1_0.distcp")), 802)
    dist.barrier()
    check(store, 3)
    (failure,) = store.take_failures()
    assert isinstance(failure, CheckpointDamaged)
    assert failure.path.startswith(str(roots[0]))
    store.delete(3)
    dist.barrier()
    assert store.checkpoints() == []


def unsaved_buffers(root: Path) -> None:
    """Ranks save all buffers outside of `state_dict()`, also those that only one rank has written.

    Otherwise the arrays of a checkpoint would differ between the ranks.
    """
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    buffers: dict[str, Any] = {
        "center": whole(1),
        "table": whole(2),
        "sharded": distribute_tensor(whole(3), mesh, [Shard(0)]),
        "empty": None,
    }
    for name, value in buffers.items():
        model.register_buffer(name, value, persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = TorchDriver({"model": model, "optimizer": optimizer})
    if dist.get_rank() == 0:
        buffers["center"].add_(0)
    for store in (driver.store(root), DCPStore(root)):  # in memory and on disk, on disk
        if not store.steps_on_disk():
            store.save(4, driver.state())
            store.wait()
        dist.barrier()
        for name in ("center", "table", "sharded"):
            buffers[name].zero_()
        driver.load(store.restore(4, driver.state()).state)
        now: dict[str, Any] = dict(model._buffers)
        assert torch.equal(now["center"], whole(1))
        assert torch.equal(now["table"], whole(2))
        assert torch.equal(now["sharded"].full_tensor(), whole(3))
        assert now["sharded"].placements == (Shard(0),)
        assert now["empty"] is None


def own_generators(root: Path) -> None:
    """Each rank continues to draw its own numbers."""
    rank = dist.get_rank()
    live: dict[str, Any] = {
        "noise": torch.Generator().manual_seed(rank),
        "rows": np.random.default_rng(rank),
    }
    store = DCPStore(root)
    store.save(4, live)
    store.wait()
    noise = torch.rand(2, generator=live["noise"]).tolist()
    rows = live["rows"].random(2).tolist()
    dist.barrier()
    apply(live, store.restore(4, live).state)
    assert torch.rand(2, generator=live["noise"]).tolist() == noise
    assert live["rows"].random(2).tolist() == rows


def different_buffers(root: Path) -> None:
    """The buffers of the first rank are on disk, which DistributedDataParallel sends to all."""
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(4)))
    model.register_buffer("center", whole(1 + rank), persistent=False)
    for layer in model:
        nn.init.constant_(cast(Tensor, layer.running_mean), 5.0 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = TorchDriver({"model": model, "optimizer": optimizer})
    cast(Tensor, model.center).add_(0)
    store = DCPStore(root)
    store.save(4, driver.state())
    store.wait()
    dist.barrier()
    saved = DCPStore(root).restore(4, driver.state()).state
    assert torch.equal(saved[BUFFERS_ITEM]["model.center"], whole(1))
    means = [saved["model"][f"{i}.running_mean"].tolist() for i in range(4)]
    assert means == [[5.0] * 4] * 4


CASES = {
    each.__name__: each
    for each in (
        kept,
        saved_by_one_process,
        in_memory,
        with_nan,
        one_cannot_write,
        another_state,
        damaged,
        several,
        unsaved_buffers,
        own_generators,
        different_buffers,
    )
}


def outcome(case: str) -> str:
    root = folder() / case
    CASES[case](root)
    return str(root)


if __name__ == "__main__":
    serve(outcome, seconds=200, cases=CASES)
