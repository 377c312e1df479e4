"""Checkpoints on disk with torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from healcore.runtime.store import atomic, inspection, manifest, protocol, ranks, structure
from healcore.runtime.store.committing import Written
from healcore.runtime.store.digest import Digest
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import StateMismatch, pickled
from healcore.runtime.store.listing import Found
from healcore.runtime.store.snapshot import aligned
from healcore.torch.plain_values import DTYPES
from healcore.torch.store import checked_dcp
from healcore.torch.store.assembling import assemble, checked
from healcore.torch.store.checked_dcp import CheckedReader
from healcore.torch.store.digesting_writer import DigestingWriter
from healcore.torch.store.flattening import HOW, Flat
from healcore.torch.store.gloo import GlooRanks, initialized
from healcore.torch.store.host_copy import TorchCopier, TorchSnapshot
from healcore.torch.store.moments import spread_parameters

# Said by DCP at every save and load of a run of one process. A filter set here and not around the
# calls: those are made in the background, and filters are the whole program's.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class DCPStore(DirectoryStore):
    """A DirectoryStore whose arrays torch.distributed.checkpoint writes and reads.

    DTensors are saved and restored in parts, by every rank its own; other tensors, taken to be the
    same everywhere, by one rank. Moments that a fresh optimizer does not have yet are spread as its
    parameters are. Checkpoints of another number of ranks can be restored, except for what was
    saved per rank.

    Between two saves it keeps the host memory of one copy of the state, for the next.

    Args:
        root: directory of this run's checkpoints; the same for all ranks.
        nonfinite_ok: patterns of array names (`model.*.mask`) where NaN and Inf are meant.
        process_group: a gloo group for the store alone; by default a new one, if the program has
            several ranks. Every rank makes the store.
        trust: pickle objects that have no plain form, and read what was pickled, DCP's own index
            included. That runs whatever code the writer of the directory put there: only for a
            directory that nobody else can write to.

    Raises:
        StoreError: the directory cannot be used.
    """

    format = "dcp"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        nonfinite_ok: Collection[str] = (),
        process_group: Any | None = None,
        trust: bool = False,
    ) -> None:
        several = process_group is not None or initialized()
        together = GlooRanks(process_group) if several else None
        super().__init__(root, nonfinite_ok=nonfinite_ok, ranks=together)
        self._group = together.group if together else None
        self.trust = trust
        self._copier = TorchCopier(self._ranks.rank, trust=trust)
        self._spare: TorchSnapshot | None = None

    def _capture(self, state: Mapping[str, Any], *, copy: bool) -> TorchSnapshot:
        if not copy:
            return self._copier.borrow(state)
        spare, self._spare = self._spare, None
        return self._copier.take(state, spare)

    def _release(self, captured: TorchSnapshot) -> None:
        if captured.arena is not None:
            self._spare = captured

    def _write(self, captured: TorchSnapshot, folder: Path) -> Written:
        captured.settle()
        tensors = {each.name: each.tensor for each in captured.entries}
        # Checked beside the writing: the one waits for the disk, the other for memory.
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(inspection.nonfinite, captured.blocks())
            digests = self._write_arrays(tensors, folder / manifest.DATA)
            bad = checking.result()
        digests |= self._write_structure(captured.structure, folder)
        return Written(digests, len(tensors), bad)

    def _write_arrays(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Digest]:
        # All ranks have the same names, and so agree on whether there is anything to write.
        if not tensors:
            return {}
        writer = DigestingWriter(folder)
        try:
            save(
                tensors,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            # Every rank gets the errors of all of them, in one that shows none of their numbers.
            raise next(iter(error.failures.values()))[0] from error
        return {f"{manifest.DATA}/{name}": found for name, found in writer.digests.items()}

    def _write_structure(
        self, entries: Mapping[str, Mapping[str, Any]], folder: Path
    ) -> dict[str, Digest]:
        """What is the same everywhere, once; what is not, for every rank."""
        rank = self._ranks.rank
        files = {_own(rank): {k: v for k, v in entries.items() if v["per_rank"]}}
        if rank == 0:
            files[manifest.STATE] = {k: v for k, v in entries.items() if not v["per_rank"]}
        digests = {}
        for name, part in files.items():
            if part or name == manifest.STATE:
                data = structure.dumps(part)
                atomic.write_new(folder / name, data)
                digests[name] = Digest(len(data), xxhash.xxh3_128_hexdigest(data))
        return digests

    def _read(self, found: Found, like: Mapping[str, Any]) -> dict[str, Any]:
        saved = json.loads((found.folder / manifest.STATE).read_bytes())
        own = _own(self._ranks.rank)
        if own in found.manifest.files:
            saved |= json.loads((found.folder / own).read_bytes())
        like = protocol.wanted(saved, like)
        live = self._fitting(found.manifest.step, saved, like)
        entries = {name: saved[name] for name in like}
        nodes = {
            node["name"]: node
            for entry in entries.values()
            for node in structure.arrays_of(entry["tree"])
        }
        reader = self._reader(found, entries, nodes)
        spread = {
            name: (p.to_local(), p._spec)  # type: ignore[attr-defined,operator]
            for name, p in spread_parameters(entries, like).items()
        }
        for leaf in live.leaves.values():
            if leaf.spread is not None:
                spread[leaf.name] = (leaf.tensor, leaf.spread)
        targets = {name: _target(node, spread) for name, node in nodes.items()}
        if any(self._ranks.gather(bool(targets))):
            load(
                targets,
                storage_reader=reader,
                process_group=self._group,
                no_dist=self._group is None,
            )
        return assemble(entries, targets, like, live.device, trust=self.trust)

    def _reader(
        self, found: Found, entries: Mapping[str, Any], nodes: Mapping[str, Any]
    ) -> FileSystemReader:
        """DCP's own, which is given the index that was read here: it would unpickle the file.

        What is refused on one rank is refused on all: the others would wait for it in `load`.
        """
        data = found.folder / manifest.DATA
        if self.trust:
            return FileSystemReader(data)

        def check() -> FileSystemReader:
            for name, entry in entries.items():
                for at in structure.pickles_in(entry["tree"], (name,)):
                    raise pickled(at, HOW)
            wanted = {name: _stored(node) for name, node in nodes.items()}
            if not wanted:
                return FileSystemReader(data)  # reads nothing
            return CheckedReader(data, checked_dcp.checked(data, found.manifest.files, wanted))

        return ranks.on_each(self._ranks, check)

    def _fitting(self, step: int, saved: Mapping[str, Any], like: Mapping[str, Any]) -> Flat:
        """The live state flattened; if it does not fit on one rank, all of them say so.

        One that raised alone would leave the others waiting for it in `load`.
        """

        def check() -> Flat:
            return checked(step, saved, like, self._ranks.rank) if like else Flat({}, {})

        try:
            return ranks.on_each(self._ranks, check)
        except ranks.RankFailed as error:
            raise StateMismatch(step, [str(error)]) from error


def _own(rank: int) -> str:
    """The file of what is saved per rank."""
    return f"state-rank-{rank:05d}.json"


def _stored(node: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape that an array has in DCP's files: what torch has no dtype for is bytes."""
    shape = tuple(node["shape"])
    if node["kind"] == "tensor":
        return node["dtype"], shape
    return "uint8", (np.dtype(node["dtype"]).itemsize * math.prod(shape),)


def _target(node: Mapping[str, Any], spread: Mapping[str, tuple[Tensor, Any]]) -> Tensor:
    """Fresh memory for an array to be read into: a DTensor where the live state has one.

    Args:
        node: of the array.
        spread: name -> local part and spec, of arrays that are DTensors in the live state.
    """
    shape = node["shape"]
    if node["kind"] != "tensor":
        size = np.dtype(node["dtype"]).itemsize * int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(aligned(size))
    dtype = DTYPES[node["dtype"]]
    part, spec = spread.get(node["name"], (None, None))
    if part is not None and spec is not None and list(spec.shape) == shape:
        from torch.distributed.tensor import DTensor

        if dtype != part.dtype:  # a moment in float32 of a parameter in bfloat16
            spec = copy.copy(spec)
            spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
        return DTensor(torch.empty_like(part, dtype=dtype), spec, requires_grad=False)
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return torch.from_numpy(aligned(size)).view(dtype).reshape(shape)
