"""Torch states in host memory, and on disk with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from healcore.runtime.store import manifest, single_file
from healcore.runtime.store.array_format import ArrayFormat, Target
from healcore.runtime.store.checkpoints import IN_MEMORY, Keep
from healcore.runtime.store.files import map_in_threads
from healcore.runtime.store.flat_state import FlatState, Leaf
from healcore.runtime.store.host_copy import HostCopy
from healcore.runtime.store.host_memory import allocate
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.ranks import Alone, Ranks, run_on_each
from healcore.runtime.store.single_file import ArrayType
from healcore.runtime.store.store import CheckpointStore
from healcore.torch.checkpoint_reader import INDEX, read_index
from healcore.torch.gradients import parameters
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
        copies: list[np.ndarray] = []
        on_host: list[tuple[np.ndarray, np.ndarray]] = []
        for part, raw in zip_longest(parts, old[: len(parts)]):
            # Part by part: the written rows of a replay buffer grow, and the weights do not.
            if raw is None or raw.nbytes != part.nbytes:
                raw = new(part.nbytes)
            copies.append(raw)
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
        devices = {part.device for part in parts if part.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

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
        # Of arrays that several ranks have, the lowest rank's is written. The buffers of a layer
        # may differ, and DistributedDataParallel sends those of its first rank to all ranks.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        try:
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
        sharded = _sharded(target)
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


def _allocate_pinned(size: int) -> np.ndarray:
    """New page-locked memory, to which CUDA copies while the program continues; uint8 (size,)."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def _read_only_file(
    checkpoint: StoredCheckpoint, nodes: Mapping[str, Any], sharded: Mapping[str, DTensor]
) -> dict[str, Tensor]:
    """Reads tensors from the only file of a small checkpoint. Each rank takes its part.

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
    arrays: dict[str, Tensor] = {}
    for name, node in nodes.items():
        dtype, shape = _stored_type(node)
        array = torch.from_numpy(found[name].copy()).view(dtype).reshape(shape)
        like = sharded.get(name)
        if like is not None:
            array = distribute_tensor(array, like.device_mesh, like.placements, src_data_rank=None)
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
    except Exception as error:  # crafted bytes may raise any exception
        raise checkpoint.damaged(file, f"is not what DCP writes: {error}") from None
    index.state_dict_metadata = {name: index.state_dict_metadata[name] for name in nodes}
    return index


def _stored_type(node: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape in DCP's files. NumPy arrays are stored as bytes."""
    if node["kind"] == "tensor":
        return DTYPES[node["dtype"]], tuple(node["shape"])
    return torch.uint8, (np.dtype(node["dtype"]).itemsize * math.prod(node["shape"]),)


def _sharded(target: Target) -> dict[str, DTensor]:
    """Array name -> DTensor whose sharding the restored array gets.

    A fresh optimizer has no moments to restore into. As plain tensors, moments of DTensors (FSDP2,
    tensor parallel) would be whole on every rank, and the first step would raise. So they are
    sharded as their parameter.
    """
    sharded: dict[str, DTensor] = {}
    params: dict[str, Any] = {}
    for name, live in target.live.items():
        if isinstance(live, Optimizer):
            for number, p in enumerate(parameters(live)):
                params[f"{name}.state.{number}"] = p.detach()
    for name, node in target.arrays.items():
        leaf = target.flat.leaves.get(name)
        like = params.get(name.rpartition(".")[0])
        if leaf is not None and leaf.layout.spec is not None:
            like = DTensor(leaf.parts[""], leaf.layout.spec, requires_grad=False)
        if isinstance(like, DTensor) and node["shape"] == list(like.shape):
            sharded[name] = like
    return sharded


def _empty(node: Mapping[str, Any], like: DTensor | None) -> Tensor:
    """New memory to read an array into, sharded as `like`."""
    dtype, shape = _stored_type(node)
    if like is not None:
        return torch.empty_like(like, dtype=dtype)
    memory = allocate(dtype.itemsize * math.prod(shape))
    return torch.from_numpy(memory).view(dtype).reshape(shape)
