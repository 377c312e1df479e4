"""`DCPStore`: checkpoints on disk with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from healcore.runtime.store import CheckpointStore, manifest, structure
from healcore.runtime.store.copies import StateCopy
from healcore.runtime.store.host_memory import allocate
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.ranks import on_each
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.structure import Flat
from healcore.torch import dcp_index
from healcore.torch.plain_values import DTYPES
from healcore.torch.store.gloo import GlooRanks, initialized
from healcore.torch.store.host_copy import TorchCopier

# DCP warns at every save and load of a program with one process. The filter is not set around the
# calls, because they run in the background and warning filters are global.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class DCPStore(CheckpointStore):
    """Checkpoints on disk, whose arrays torch.distributed.checkpoint writes and reads.

    Every rank saves and restores its own part of a DTensor. Other tensors must be equal on all
    ranks; one rank saves them. Moments that a fresh optimizer lacks are sharded like its
    parameters. Another number of ranks can restore all values except per-rank values. Between two
    saves the store keeps the host memory of one copy of the state.

    Args:
        root: directory for this run's checkpoints only, the same for all ranks; created if needed.
        in_memory: copies to keep in host memory too, for fast rollbacks, or None for no copies.
        ranks: the ranks that save together, or None for all ranks of the program. Every rank has to
            create the store.

    Raises:
        StoreError: the directory cannot be used.
    """

    format = "dcp"
    root: Path

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        in_memory: Keep | None = None,
        ranks: GlooRanks | None = None,
    ) -> None:
        ranks = ranks or (GlooRanks() if initialized() else None)
        super().__init__(TorchCopier(ranks.rank if ranks else 0), root, keep=in_memory, ranks=ranks)

    @property
    def _group(self) -> Any:
        """The group for DCP, or None for one process."""
        return self.processes.group if isinstance(self.processes, GlooRanks) else None

    def _write_arrays(self, copy: StateCopy, folder: Path) -> None:
        # All ranks have the same names, so either every rank returns here or no rank does.
        if not copy.flat.leaves:
            return
        try:
            save(
                {name: self.copier.array(leaf, None) for name, leaf in copy.flat.leaves.items()},
                # The store synchronizes all files at the end.
                storage_writer=FileSystemWriter(folder, sync_files=False),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            # DCP's exception holds the errors of all ranks and has no error number.
            failure = next(iter(error.failures.values()))[0]
        else:
            return
        raise failure  # here, where its context is still the error of the system

    def _read_arrays(
        self,
        checkpoint: StoredCheckpoint,
        entries: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Tensor]:
        nodes = structure.nodes_of(entries)
        reader = self._reader(checkpoint, nodes)
        sharded = _moments_of_dtensors(nodes, like)
        for leaf in live.leaves.values():
            if leaf.layout is not None:
                sharded[leaf.name] = (leaf.parts[""], leaf.layout)
        targets = {name: _empty_array(node, sharded) for name, node in nodes.items()}
        if any(self.processes.gather(bool(targets))):
            try:
                load(
                    targets,
                    storage_reader=reader,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            except CheckpointException as error:  # a BaseException, on every rank
                failure = next(iter(error.failures.values()))[0]
                lines = str(failure).splitlines() or [""]
                why = f"cannot be read by DCP ({type(failure).__name__}: {lines[0][:200]})"
                raise checkpoint.damaged(manifest.DATA, why) from error
        return targets

    def _reader(self, checkpoint: StoredCheckpoint, nodes: Mapping[str, Any]) -> FileSystemReader:
        """DCP's own reader, with an index that is parsed without pickle.

        If one rank rejects the index, all ranks raise.
        """
        wanted = {name: _stored_type(node) for name, node in nodes.items()}
        index = on_each(self.processes, lambda: _checked_index(checkpoint, wanted))
        reader = FileSystemReader(checkpoint.folder / manifest.DATA)
        reader.read_metadata = lambda *args, **kwargs: index  # DCP would unpickle its file
        return reader


def _checked_index(
    checkpoint: StoredCheckpoint, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> Metadata:
    """DCP's index, with the part for some tensors, read without pickle.

    Other entries stay out, because DCP unpickles values that are not tensors.

    Args:
        checkpoint: the checkpoint.
        wanted: name -> required dtype and shape of a tensor.

    Raises:
        CheckpointDamaged: a tensor is missing or differs, or the index is not as DCP writes it.
    """
    if not wanted:
        return Metadata({})
    file = f"{manifest.DATA}/{dcp_index.INDEX}"
    try:
        index = dcp_index.read(checkpoint.folder / file)
        for name, required in wanted.items():
            entry = index.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"it has no tensor {name:.200}")
            if (entry.properties.dtype, tuple(entry.size)) != required:
                actual = f"{entry.properties.dtype}{list(entry.size)}"
                raise ValueError(f"{name:.200} is {actual:.200}, not {required}")
    except (OSError, ValueError) as error:
        raise checkpoint.damaged(file, f"is not what DCP writes: {error}") from None
    index.state_dict_metadata = {name: index.state_dict_metadata[name] for name in wanted}
    return index


def _moments_of_dtensors(
    nodes: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Any]]:
    """Array name of a saved moment -> local part and spec of its parameter, if that is a DTensor.

    A fresh optimizer has no moments to restore into. As plain tensors, moments of DTensors (FSDP2,
    tensor parallel) would be whole on every rank, and the first step would raise.
    """
    sharded = {}
    for name, live in like.items():
        if not isinstance(live, Optimizer):
            continue
        params: list[Any] = [p for group in live.param_groups for p in group["params"]]
        moments = re.compile(re.escape(name) + r"\.state\.(\d+)\.")
        for array, node in nodes.items():
            match = moments.match(array)
            if match is None or int(match[1]) >= len(params):
                continue
            p = params[int(match[1])]
            if hasattr(p, "to_local") and node["shape"] == list(p.shape):
                sharded[array] = p.to_local(), p._spec
    return sharded


def _stored_type(node: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape in DCP's files. NumPy arrays are stored as bytes."""
    if node["kind"] == "tensor":
        return DTYPES[node["dtype"]], tuple(node["shape"])
    return torch.uint8, (_nbytes(node),)


def _nbytes(node: Mapping[str, Any]) -> int:
    tensor = node["kind"] == "tensor"
    dtype = DTYPES[node["dtype"]] if tensor else np.dtype(node["dtype"])
    return dtype.itemsize * math.prod(node["shape"])


def _empty_array(node: Mapping[str, Any], sharded: Mapping[str, tuple[Tensor, Any]]) -> Tensor:
    """New memory to read an array into; a DTensor if `sharded` has its local part and spec."""
    shape = node["shape"]
    if node["kind"] != "tensor":
        return torch.from_numpy(allocate(_nbytes(node)))
    dtype = DTYPES[node["dtype"]]
    part, spec = sharded.get(node["name"], (None, None))
    if part is not None and spec is not None and list(spec.shape) == shape:
        from torch.distributed.tensor import DTensor

        if dtype != part.dtype:  # a float32 moment of a bfloat16 parameter
            spec = copy.copy(spec)
            spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
        return DTensor(torch.empty_like(part, dtype=dtype), spec, requires_grad=False)
    return torch.from_numpy(allocate(_nbytes(node))).view(dtype).reshape(shape)
