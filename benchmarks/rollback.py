"""The cost of a checkpoint with healcore, compared with copying and saving the same bytes.

In memory: MemoryStore against a plain copy, for saving into memory that was used before (what a
ring of buffers written by hand would do), for restoring into one fresh block. On disk: DCPStore and
OrbaxStore, with digests, finite check and all, against DCP's and Orbax's own asynchronous save of
the same state, from the call until it is on disk. Everything in one process, interleaved.

    python benchmarks/rollback.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import Contender, Timing, arguments, interleave, machine, write_json

MEGABYTES, ARRAYS = 256, 96
QUICK_MEGABYTES, QUICK_ARRAYS = 64, 24


def weights(megabytes: int, arrays: int) -> list[np.ndarray]:
    """Matrices of random float32: they hardly compress, like trained weights."""
    side = int((megabytes * 1e6 / 4 / arrays) ** 0.5)
    generator = np.random.default_rng(0)
    return [generator.standard_normal((side, side), dtype=np.float32) for _ in range(arrays)]


def copied(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Copies into fresh memory in the fastest way: one block, which gets huge pages."""
    sizes = [-(-each.nbytes // 64) * 64 for each in arrays]
    block = np.empty(sum(sizes) + 64, np.uint8)
    at = -block.ctypes.data % 64  # XLA takes aligned memory as it is
    copies = []
    for each, size in zip(arrays, sizes, strict=True):
        copy = block[at : at + each.nbytes].view(each.dtype).reshape(each.shape)
        np.copyto(copy, each)
        copies.append(copy)
        at += size
    return copies


class Fresh:
    """Directories to save into, one after another; the one before is removed untimed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._count = 0

    def clear(self) -> None:
        """Removes what was saved."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)

    def next(self) -> Path:
        """A directory that does not exist yet."""
        self._count += 1
        return self._root / str(self._count)


def stored(store: Any, state: dict[str, Any]) -> Callable[[], None]:
    """Saves and waits; each save has a new step."""
    step = [0]

    def save() -> None:
        step[0] += 1
        store.save(step[0], state)
        store.wait()

    return save


def emptied(store: Any) -> Callable[[], None]:
    """Removes what was saved before, untimed."""

    def clear() -> None:
        for saved in store.checkpoints():
            store.delete(saved.step)

    return clear


# -- torch -----------------------------------------------------------------------------------------


def bench_torch(arrays: list[np.ndarray], root: Path, rounds: int) -> dict[str, list[Timing]]:
    """MemoryStore and DCPStore."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from healcore.torch.store import DCPStore, MemoryStore

    tensors = {f"layer{i}.weight": torch.from_numpy(each) for i, each in enumerate(arrays)}
    state = {"model": tensors}
    buffers = [np.empty_like(each) for each in arrays]

    def into_used() -> None:
        # With NumPy: torch's copy_ is not faster here, and far slower next to a busy process.
        for buffer, each in zip(buffers, arrays, strict=True):
            np.copyto(buffer, each)

    def clone() -> Any:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    memory, disk = MemoryStore(), DCPStore(root / "store")
    own, asynchronous = Fresh(root / "sync"), Fresh(root / "async")
    saving = [
        Contender("plain copy", into_used, memory.wait),
        Contender("MemoryStore.save", *blocking(memory, state)),
        Contender("  and inspected", stored(memory, state), memory.wait),
    ]
    restoring = [
        Contender("plain copy", lambda: copied(arrays)),
        Contender("MemoryStore.restore", lambda: memory.restore(newest(memory), state)),
        Contender("torch's clone()", clone),
    ]
    to_disk = [
        Contender(
            "dcp.async_save",
            lambda: async_save(dict(tensors), checkpoint_id=asynchronous.next()).result(),  # type: ignore[union-attr]
            asynchronous.clear,
        ),
        Contender("DCPStore", stored(disk, state), emptied(disk)),
        Contender("dcp.save", lambda: save(dict(tensors), checkpoint_id=own.next()), own.clear),
    ]
    return {
        "memory, save": timed(saving, rounds),
        "memory, restore": timed(restoring, rounds),
        "disk": timed(to_disk, disk_rounds(rounds)),
    }


# -- JAX -------------------------------------------------------------------------------------------


def bench_jax(arrays: list[np.ndarray], root: Path, rounds: int) -> dict[str, list[Timing]]:
    """MemoryStore and OrbaxStore."""
    import jax
    from orbax.checkpoint import v1 as ocp

    from healcore.jax.store import MemoryStore, OrbaxStore

    params = {f"layer{i}": {"kernel": jax.device_put(each)} for i, each in enumerate(arrays)}
    params = jax.block_until_ready(jax.tree.map(lambda leaf: leaf + 0, params))
    state = {"params": params}
    leaves = jax.tree.leaves(params)
    buffers = [np.empty_like(each) for each in arrays]

    def into_used() -> None:
        for buffer, leaf in zip(buffers, leaves, strict=True):
            np.copyto(buffer, np.asarray(leaf))

    def fresh() -> Any:
        return [jax.device_put(each) for each in copied(arrays)]

    def orbax(folder: Fresh) -> Callable[[], None]:
        def save() -> None:
            context = ocp.Context()
            context.array.saving.use_compression = False
            with context:
                path = str(folder.next())
                ocp.save_checkpointables_async(path, {"state": params}).result()

        return save

    memory = MemoryStore()
    plain, own = OrbaxStore(root / "plain"), Fresh(root / "own")
    saving = [
        Contender("plain copy", into_used, memory.wait),
        Contender("MemoryStore.save", *blocking(memory, state)),
        Contender("  and inspected", stored(memory, state), memory.wait),
    ]
    restoring = [
        Contender("plain copy", fresh),
        Contender("MemoryStore.restore", lambda: memory.restore(newest(memory), state)),
    ]
    uncompressed = [
        Contender("Orbax", orbax(own), own.clear),
        Contender("OrbaxStore", stored(plain, state), emptied(plain)),
    ]
    return {
        "memory, save": timed(saving, rounds),
        "memory, restore": timed(restoring, rounds),
        "disk, not compressed": timed(uncompressed, disk_rounds(rounds)),
    }


# -- both ------------------------------------------------------------------------------------------


def blocking(store: Any, state: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """How long the training loop stands still; the background's part is waited for untimed."""
    step = [1_000_000]

    def save() -> None:
        step[0] += 1
        store.save(step[0], state)

    return save, store.wait


def newest(store: Any) -> int:
    """The step to restore."""
    return store.checkpoints()[-1].step


def disk_rounds(rounds: int) -> int:
    """Fewer rounds for slow disks, but at least three."""
    return max(3, rounds // 2)


def timed(contenders: list[Contender], rounds: int) -> list[Timing]:
    """Times the contenders; ratios are relative to the first."""
    gc.collect()
    return interleave(contenders, reference=contenders[0].name, rounds=rounds, warmup=2)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary one)")
    options = parser.parse_args()
    megabytes, count = (QUICK_MEGABYTES, QUICK_ARRAYS) if options.quick else (MEGABYTES, ARRAYS)
    rounds = 5 if options.quick else 21
    arrays = weights(megabytes, count)
    nbytes = sum(each.nbytes for each in arrays)
    print(machine())
    print(f"{nbytes / 1e6:.0f} MB of float32 in {count} arrays, median of {rounds} rounds\n")
    root = Path(tempfile.mkdtemp(prefix="healcore-bench-", dir=options.directory))
    result: dict[str, Any] = {"bytes": nbytes, "arrays": count, "rounds": rounds}
    try:
        for name, bench in (("torch", bench_torch), ("jax", bench_jax)):
            found = bench(arrays, root / name, rounds)
            result[name] = {what: [vars(each) for each in rows] for what, rows in found.items()}
            for what, rows in found.items():
                print(f"{name}, {what}")
                for row in rows:
                    speed = nbytes / row.median_ms / 1e6
                    print(
                        f"  {row.name:22} {row.median_ms:9.1f} ms  {speed:6.2f} GB/s"
                        f"  {row.ratio:6.2f} × the time of {rows[0].name}"
                    )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
