"""`OrbaxStore` and `MemoryStore`: checkpoints of JAX states on disk and in host memory.

`CheckpointStore` (`healcore/runtime/store`) does what does not depend on the framework: manifests,
digests, the copies in memory. `JaxFormat` (`array_format.py`) is its part for JAX.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from healcore.jax.driver.program_state import MARK, program_state_of
from healcore.jax.store.array_format import JaxFormat
from healcore.jax.store.coordination import CoordinatedRanks
from healcore.runtime.store.checkpoints import IN_MEMORY, Keep, Restored
from healcore.runtime.store.store import CheckpointStore


class _JaxStore(CheckpointStore):
    """A store of JAX states, which also takes the state of a Healer as the program passed it."""

    def restore(self, step: int, like: Any) -> Restored:
        """Verifies a checkpoint and reads it, from memory if possible.

        A checkpoint of a Healer holds the state without its healing parts, nnx objects as trees,
        and Python numbers in an item of their own. For such a checkpoint, `like` is the state as
        the Healer was given it, or some of its names. The result has the same form: new nnx objects
        for nnx objects, and the healing parts of `like`.

        Args:
            step: step of the checkpoint.
            like: the live state, or some of its names. It is not changed. The result has its
                structure, shapes, dtypes and shardings.

        Returns:
            The state and the records of the checkpoint.

        Raises:
            CheckpointDamaged: the content differs from the saved content.
            StateMismatch: the checkpoint was saved from another state.
            CheckpointNotFound: the step has no checkpoint.
        """
        restored = super().restore(step, like)
        # Only the Healer passes healcore's own item.
        items = isinstance(like, Mapping) and MARK in like
        if items or MARK not in restored.state:
            return restored
        live = program_state_of(like)
        return restored._replace(state=live.copy_with(live.restored(restored.state)))


class MemoryStore(_JaxStore):
    """Stores copies of a JAX state in host memory. Copies of arrays on a GPU are pinned.

    The store of a `Healer` without a directory: a rollback works, but a killed process loses the
    copies.

    Args:
        keep: number of copies of each kind to keep. A save needs the memory of one more copy.
    """

    def __init__(self, keep: Keep = IN_MEMORY) -> None:
        super().__init__(JaxFormat(), keep=keep)


class OrbaxStore(_JaxStore):
    """Stores checkpoints on disk in Orbax's format. Each process saves its shards.

        store = OrbaxStore("checkpoints")
        step = max(each.step for each in store.checkpoints() if each.finite)
        state = store.restore(step, state).state  # as the Healer was given it

    Orbax can read the arrays of a checkpoint without healcore:
    ``ocp.load_checkpointables(step_directory / "data")["state"]["params.dense.kernel"]``. The
    program's own Orbax manager may save at the same time.

    ``save`` takes a mapping of names to trees: ``store.save(50, {"params": params})``. ``restore``
    takes the same mapping. For a checkpoint of a Healer it takes the state as the Healer was given
    it, which need not be a mapping: ``store.restore(50, state).state``.

    The store permanently holds host memory for one copy of the state.

    In a program of several processes (`jax.distributed`), all processes construct the store and
    call its methods together. Each process writes and reads its own shards of an array that spans
    processes. An array that does not span processes (a counter, a key) has to be equal in all
    processes. Another number of processes can restore a checkpoint, onto another mesh.

    Args:
        root: directory for only this run's checkpoints, the same for all processes. Created if it
            does not exist.
        in_memory: copies to keep in host memory too, for fast rollbacks, or None for no copies.

    Raises:
        StoreError: the directory cannot be used.
    """

    root: Path

    def __init__(self, root: str | os.PathLike[str], *, in_memory: Keep | None = None) -> None:
        ranks = None
        if jax.process_count() > 1:
            ranks = CoordinatedRanks()
        super().__init__(JaxFormat(ranks), root, keep=in_memory, ranks=ranks)
