"""Torch states in host memory, and on disk with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from healcore.runtime.store import manifest, single_file
from healcore.runtime.store.array_format import ArrayFormat, Target
from healcore.runtime.store.checkpoints import BUFFERS_ITEM, IN_MEMORY, Keep
from healcore.runtime.store.files import map_in_threads
from healcore.runtime.store.flat_state import FlatState, Leaf
from healcore.runtime.store.host_copy import HostCopy
from healcore.runtime.store.host_memory import allocate
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.ranks import Alone, Ranks, run_on_each
from healcore.runtime.store.single_file import ArrayType
from healcore.runtime.store.store import CheckpointStore
from healcore.torch.checkpoint_reader import INDEX, read_index
from healcore.torch.live_state import identities
from healcore.torch.store.gloo import GlooRanks, is_distributed
from healcore.torch.store.state import DTYPES, add_entry, decoded, dtype_name


class MemoryStore(CheckpointStore):
    """Copies of a torch state in host memory, pinned where the state is on CUDA.

        store = MemoryStore()
        store.save(1, {"model": model})
        restored = store.restore(1, {"model": model})

    Args:
        keep: how many copies of each kind are kept; a save adds one more while it runs. The copies
            are lost with the process.
    """

    def __init__(self, keep: Keep = IN_MEMORY) -> None:
        super().__init__(TorchFormat(), keep=keep)


class DCPStore(CheckpointStore):
    """Checkpoints on disk, whose arrays torch.distributed.checkpoint writes and reads.

    A state of up to 16 MiB of one process is one file in the format of safetensors instead, because
    the files of DCP take longer than the rest of such a save.

    Every rank saves and restores its own part of a DTensor. Other tensors must be equal on all
    ranks; one rank saves them. Moments that a fresh optimizer lacks are sharded like its
    parameters. Another number of ranks can restore all values except per-rank values. Between two
    saves the store keeps the host memory of one copy of the state.

        store = DCPStore("checkpoints")
        step = max(each.step for each in store.checkpoints() if each.finite)
        weights = store.restore(step, {"model": model}).state["model"]

    Args:
        root: directory for this run's checkpoints only, the same for all ranks; created if needed.
        in_memory: copies to keep in host memory too, for fast rollbacks, or None for no copies.
        ranks: the ranks that save together, `Alone()` for this rank, or None for all ranks of the
            program. All of these ranks have to create the store.

    Raises:
        StoreError: the directory cannot be used.
    """

    root: Path

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        in_memory: Keep | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if ranks is None:
            ranks = Alone()
            if is_distributed():
                ranks = GlooRanks()
        super().__init__(TorchFormat(ranks), root, keep=in_memory, ranks=ranks)


class TorchFormat(ArrayFormat):
    """Copies torch states, and writes and reads their arrays with DCP.

    Args:
        ranks: the ranks that save together.
    """

    name = "dcp"

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Alone()
        # DCP warns at every save and load of a program with one process. The filter is not set
        # around the calls, because they run in the background and warning filters are global.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")

    def flatten(self, state: Mapping[str, Any]) -> FlatState:
        """Splits a state into JSON and tensors, with the identities of optimizers.

        An identity says which parameters an optimizer has, by their names in the modules of the
        state. A restore with other parameters then raises, instead of giving a parameter the
        moments of another.

        Args:
            state: name -> live object.

        Returns:
            The tensors without copies, and the entry of each name.
        """
        flat = super().flatten(state)
        for name, identity in identities(state).items():
            flat.entries[name]["identity"] = identity
        for name, value in state.items():
            if isinstance(value, nn.Module):
                flat.may_differ.update(f"{name}.{path}" for path, _ in value.named_buffers())
        for leaf in flat.leaves:
            if leaf.startswith(f"{BUFFERS_ITEM}."):
                flat.may_differ.add(leaf)
        return flat

    def add(self, flat: FlatState, name: str, value: Any) -> None:
        """Adds the entry and the tensors of a value, without copies. See `ArrayFormat.add`.

        Args:
            flat: receives the entry and the tensors.
            name: the name of the value in the state.
            value: an object with `state_dict`, a tensor, or a structure of these.

        Raises:
            UnsavableState: the value cannot be saved.
        """
        add_entry(flat, name, value, self._ranks.rank)

    def copy_parts(
        self, parts: Sequence[Tensor], old: Sequence[np.ndarray]
    ) -> tuple[Sequence[np.ndarray], Callable[[], object]]:
        """Copies the bytes of tensors. From CUDA they go to pinned memory, in stream order.

        Args:
            parts: dense tensors on any device.
            old: memory of an earlier copy that is no longer needed, uint8 arrays of shape (n,). An
                array of the right size is used again.

        Returns:
            A uint8 array of shape (n,) for each part, and a function that waits until the copies
            from CUDA are complete.
        """
        new: Callable[[int], np.ndarray] = allocate
        if any(part.is_cuda for part in parts):
            new = _allocate_pinned
        # Part by part: the written rows of a replay buffer grow, and the weights do not.
        copies: list[np.ndarray] = []
        on_host: list[tuple[np.ndarray, np.ndarray]] = []
        for part, known in zip_longest(parts, old[: len(parts)]):
            if known is not None and known.nbytes == part.nbytes:
                copies.append(known)
            else:
                copies.append(new(part.nbytes))
        for part, raw in zip(parts, copies, strict=True):
            copied = _view(raw, torch.empty_like(part, device="meta"))
            if part.device.type == "cpu" and part.numel() and part.stride() == copied.stride():
                # Rejected: copy_, whose threads wait for each other after every tensor. While a
                # data loader uses their cores, the wait takes ten times as long as the copy.
                dense = part.as_strided((part.numel(),), (1,), part.storage_offset())
                # Rejected: numpy(), after which the program cannot resize the tensor's storage.
                on_host.append((raw, np.from_dlpack(dense.view(torch.uint8))))
            else:
                copied.copy_(part, non_blocking=part.is_cuda)
        size = sum(len(raw) for raw, _ in on_host)
        map_in_threads(lambda pair: np.copyto(*pair), on_host, size)
        events = []
        for device in {part.device for part in parts if part.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return copies, wait

    def array(self, leaf: Leaf, live: Leaf | None) -> Tensor:
        """The tensor, or a DTensor whose part is on the device of the live part.

        Args:
            leaf: the bytes of the tensor, with its layout.
            live: the leaf of the live state with this name, or None.

        Returns:
            A view of the bytes; a copy for a DTensor on an accelerator.
        """
        part = _view(leaf.parts[""], leaf.layout.dense)
        spec = leaf.layout.spec
        if spec is None:
            return part
        # Rejected: DTensor.from_local, which moves the part to the mesh's device.
        if live is not None:
            part = part.to(live.parts[""].device)
        return DTensor(part, spec, requires_grad=False)

    def decode_array(self, node: Mapping[str, Any], array: Tensor, live: Leaf | None) -> Any:
        """A tensor on its live device, or a NumPy array or scalar.

        Args:
            node: the description of the array in the checkpoint, as `add` has made it.
            array: what was read, in host memory.
            live: the leaf of the live state with this name, or None.
        """
        if live is not None and node["kind"] == "tensor":
            array = array.to(live.parts[""].device)
        return decoded(node, array)

    def whole(self, leaf: Leaf) -> tuple[ArrayType, np.ndarray] | None:
        """The tensor, or the bytes of a NumPy array, for the only file of a small checkpoint.

        Args:
            leaf: the bytes of the tensor, with its layout.

        Returns:
            The type, and the bytes in row-major order, uint8 (n,). None for a DTensor, because each
            rank has only a part of it.
        """
        dense = leaf.layout.dense
        raw = leaf.parts[""]
        if leaf.layout.spec is not None:
            return None
        if not dense.is_contiguous():
            raw = _view(raw, dense).contiguous().reshape(-1).view(torch.uint8).numpy()
        return ArrayType(dtype_name(dense), dense.shape, dense.itemsize), raw

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments of DCP for the ranks."""
        group = getattr(self._ranks, "group", None)
        return {"process_group": group, "no_dist": group is None}

    def write(self, copy: HostCopy, folder: Path) -> None:
        """Writes the tensors with DCP; the store synchronizes all files at the end.

        Args:
            copy: a copy of the state in host memory.
            folder: an empty directory, the same on all ranks.

        Raises:
            Exception: what a rank has raised, usually an OSError with its error number.
        """
        # All ranks have the same names, so either every rank returns here or no rank does.
        if not copy.flat.leaves:
            return
        tensors = {name: self.array(leaf, None) for name, leaf in copy.flat.leaves.items()}
        writer = FileSystemWriter(folder, sync_files=False)
        try:
            planner = _Planner(copy.flat.may_differ)
            save(tensors, storage_writer=writer, planner=planner, **self._options)
        except CheckpointException as error:
            # DCP's exception holds the errors of all ranks and has no error number.
            failure = next(iter(error.failures.values()))[0]
        else:
            return
        raise failure  # here, where its context is still the error of the system

    def read(self, checkpoint: StoredCheckpoint, target: Target) -> dict[str, Tensor]:
        """Reads tensors, sharded like the live tensors, and parses DCP's index without pickle.

        Args:
            checkpoint: the checkpoint on disk.
            target: the arrays to read, and the live state that receives them.

        Returns:
            Array name -> tensor in host memory; a DTensor on its own device.

        Raises:
            CheckpointDamaged: a file is missing, cut off, or not what was saved.
        """
        nodes = target.arrays
        ranks = self._ranks
        sharded = _moments_of_dtensors(nodes, target.live)
        for leaf in target.flat.leaves.values():
            if leaf.layout.spec is not None:
                sharded[leaf.name] = (leaf.parts[""], leaf.layout.spec)
        if checkpoint.only_file is not None:
            return run_on_each(ranks, lambda: _read_only_file(checkpoint, nodes, sharded))
        # If one rank rejects the index, all ranks raise.
        index = run_on_each(ranks, lambda: _checked_index(checkpoint, nodes))
        reader = FileSystemReader(checkpoint.folder / manifest.DATA)
        reader.read_metadata = lambda *args, **kwargs: index  # DCP would unpickle its file
        arrays = {name: _empty(node, sharded.get(name)) for name, node in nodes.items()}
        if any(ranks.gather(bool(arrays))):
            try:
                load(arrays, storage_reader=reader, **self._options)
            except CheckpointException as error:  # a BaseException, on every rank
                failure = next(iter(error.failures.values()))[0]
                lines = str(failure).splitlines() or [""]
                why = f"cannot be read by DCP ({type(failure).__name__}: {lines[0][:200]})"
                raise checkpoint.damaged(manifest.DATA, why) from error
        return arrays


class _Planner(DefaultSavePlanner):
    """Writes arrays that may differ between ranks from the lowest rank.

    DCP shares the writes of equal arrays among the ranks. DistributedDataParallel sends the buffers
    of its first rank to all ranks at each forward pass, so the buffers of another rank would be
    wrong after a restart.

    Args:
        may_differ: names of these arrays.
    """

    def __init__(self, may_differ: Collection[str]) -> None:
        super().__init__()
        self._may_differ = may_differ

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leaves out of each plan what a lower rank writes. Called on the first rank."""
        seen: set[MetadataIndex] = set()
        plans: list[SavePlan] = []
        for plan in all_plans:
            items: list[WriteItem] = []
            for item in plan.items:
                if item.index.fqn in self._may_differ:
                    if item.index in seen:
                        continue
                    seen.add(item.index)
                items.append(item)
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


def _allocate_pinned(size: int) -> np.ndarray:
    """New page-locked memory, to which CUDA copies while the program continues; uint8 (size,)."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def _read_only_file(
    checkpoint: StoredCheckpoint, nodes: Mapping[str, Any], sharded: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Reads tensors from the only file of a small checkpoint.

    Args:
        checkpoint: the checkpoint.
        nodes: array name -> node.
        sharded: array name -> local part and spec of the DTensor that the array becomes.

    Raises:
        CheckpointDamaged: an array is missing or of another type.
    """
    assert checkpoint.only_file is not None
    types = {}
    for name, node in nodes.items():
        dtype, shape = _stored_type(node)
        types[name] = ArrayType(str(dtype).removeprefix("torch."), shape, dtype.itemsize)
    try:
        found = single_file.read_arrays(checkpoint.only_file, types)
    except (OSError, ValueError) as error:
        raise checkpoint.damaged(checkpoint.only_file.name, f"cannot be read: {error}") from None
    arrays = {}
    for name, node in nodes.items():
        dtype, shape = _stored_type(node)
        whole = torch.from_numpy(found[name]).view(dtype).reshape(shape)
        array = _empty(node, sharded.get(name))
        if isinstance(array, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(
                shape, array.device_mesh, array.placements
            )
            own = []
            for start, size in zip(offsets, sizes, strict=True):
                own.append(slice(start, start + size))
            array.to_local().copy_(whole[tuple(own)])
        else:
            array.copy_(whole)
        arrays[name] = array
    return arrays


def _view(raw: np.ndarray, dense: Tensor) -> Tensor:
    """Views bytes, uint8 (n,), with the dtype, shape and strides of a dense tensor."""
    return torch.from_numpy(raw).view(dense.dtype).as_strided(dense.shape, dense.stride())


def _checked_index(checkpoint: StoredCheckpoint, nodes: Mapping[str, Any]) -> Metadata:
    """The part of DCP's index for some array nodes, read without pickle.

    Other entries stay out, because DCP unpickles values that are not tensors.

    Raises:
        CheckpointDamaged: a tensor is missing or differs, or the index is not as DCP writes it.
    """
    if not nodes:
        return Metadata({})
    file = f"{manifest.DATA}/{INDEX}"
    try:
        index = read_index(checkpoint.folder / file)
        for name, node in nodes.items():
            entry = index.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"it has no tensor {name:.200}")
            stored, required = (entry.properties.dtype, tuple(entry.size)), _stored_type(node)
            if stored != required:
                raise ValueError(f"{name:.200} is {stored!s:.200}, not {required}")
    except (OSError, ValueError) as error:
        raise checkpoint.damaged(file, f"is not what DCP writes: {error}") from None
    index.state_dict_metadata = {name: index.state_dict_metadata[name] for name in nodes}
    return index


def _stored_type(node: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape in DCP's files. NumPy arrays are stored as bytes."""
    if node["kind"] == "tensor":
        return DTYPES[node["dtype"]], tuple(node["shape"])
    return torch.uint8, (np.dtype(node["dtype"]).itemsize * math.prod(node["shape"]),)


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


def _empty(node: Mapping[str, Any], sharded: tuple[Tensor, Any] | None) -> Tensor:
    """New memory to read an array into: a DTensor if the local part and spec of one are given."""
    dtype, shape = _stored_type(node)
    if sharded is None or tuple(sharded[1].shape) != shape:
        memory = allocate(dtype.itemsize * math.prod(shape))
        return torch.from_numpy(memory).view(dtype).reshape(shape)
    part, spec = sharded
    if dtype != part.dtype:  # a float32 moment of a bfloat16 parameter
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    return DTensor(torch.empty_like(part, dtype=dtype), spec, requires_grad=False)
