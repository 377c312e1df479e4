"""Torch states in host memory, and on disk with torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from healcore.runtime.store.array_format import (
    ArrayFormat,
    FlatState,
    Leaf,
    Target,
    copy_to_host,
    raw,
)
from healcore.runtime.store.checkpoints import IN_MEMORY, Keep
from healcore.runtime.store.ranks import Alone, Ranks, run_on_each
from healcore.runtime.store.store import CheckpointStore, Roots
from healcore.torch.checkpoint_reader import read_index, read_tensors
from healcore.torch.gradients import parameters
from healcore.torch.live_state import identities
from healcore.torch.store.gloo import GlooRanks, is_distributed
from healcore.torch.store.state import DTYPES, add_entry


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

    The tensors of a state of up to 16 MiB of one process are one file of safetensors instead,
    because the files of DCP take longer than the rest of such a save.

    Every rank saves and restores its own part of a DTensor. Other tensors must be equal on all
    ranks; one rank saves them. Moments that a fresh optimizer lacks are sharded like its
    parameters. Another number of ranks can restore all values except per-rank values. Between two
    saves the store keeps the host memory of one copy of the state.

        store = DCPStore("checkpoints")
        step = max(each.step for each in store.checkpoints() if each.finite)
        weights = store.restore(step, {"model": model}).state["model"]

    Args:
        root: directory for this run's checkpoints only, the same for all ranks; created if needed.
            A list of directories gets each checkpoint in all of them.
        in_memory: copies to keep in host memory too, for fast rollbacks, or None for no copies.
        ranks: the ranks that save together, `Alone()` for this rank, or None for all ranks of the
            program. All of these ranks have to create the store.

    Raises:
        StoreError: the directory cannot be used.
    """

    root: Path

    def __init__(
        self,
        root: Roots,
        *,
        in_memory: Keep | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if ranks is None:
            if is_distributed():
                ranks = GlooRanks()
            else:
                ranks = Alone()
        super().__init__(TorchFormat(ranks), root, keep=in_memory, ranks=ranks)


class TorchFormat(ArrayFormat):
    """Copies torch states, and writes and reads their arrays with DCP.

    In host memory a leaf has one part, at "": the bytes of this process's part of the tensor, uint8
    (*shape, bytes of an element). The layout is the DTensorSpec of a DTensor, or None.

    Args:
        ranks: the ranks that save together.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Alone()
        group = getattr(ranks, "group", None)
        self._options: dict[str, Any] = {"process_group": group, "no_dist": group is None}
        """The arguments of DCP for the ranks."""
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
        self, parts: Sequence[Tensor]
    ) -> tuple[Sequence[np.ndarray], Callable[[], object]]:
        """Copies the bytes of tensors. From CUDA they go to pinned memory, in stream order.

        Args:
            parts: tensors, of any strides.

        Returns:
            A uint8 array for each part, and a function that waits until the copies from CUDA are
            complete.
        """
        copies: list[np.ndarray] = []
        on_host: list[tuple[np.ndarray, np.ndarray]] = []
        for part in parts:
            source = part.unsqueeze(-1).view(torch.uint8)
            # Page-locked for CUDA, so that the program continues during the copy.
            memory = torch.empty(source.shape, dtype=torch.uint8, pin_memory=part.is_cuda)
            copies.append(memory.numpy())
            if part.device.type == "cpu":
                # Rejected: copy_, whose threads wait for each other after every tensor. While a
                # data loader uses their cores, the wait takes ten times as long as the copy.
                # Rejected: numpy(), after which the program cannot resize the tensor's storage.
                on_host.append((copies[-1], np.from_dlpack(source)))
            else:
                memory.copy_(source, non_blocking=part.is_cuda)
        copy_to_host(on_host)
        devices = {part.device for part in parts if part.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return copies, lambda: [event.synchronize() for event in events]

    def part_of_bytes(self, data: np.ndarray, node: Mapping[str, Any]) -> np.ndarray:
        """The bytes of a tensor with its shape."""
        return data.reshape(*node["shape"], DTYPES[node["dtype"]].itemsize)

    def arrays(self, leaves: Mapping[str, Leaf], target: Target) -> dict[str, Tensor]:
        """Tensors, or DTensors whose parts are on the device of the live parts.

        Args:
            leaves: the bytes of the tensors.
            target: the live state. A whole tensor is sharded like its live tensor.
        """
        sharded = _sharded(target)
        arrays: dict[str, Tensor] = {}
        for name, leaf in leaves.items():
            array, live = _tensor(leaf), target.flat.leaves.get(name)
            if isinstance(array, DTensor):
                # Rejected: DTensor.from_local, which moves the part to the mesh's device.
                part = array.to_local()
                if live is None:
                    device = part.device
                else:
                    device = live.parts[""].device
                array = DTensor(part.to(device), leaf.layout, requires_grad=False)
            elif name in sharded:
                mesh, places = sharded[name].device_mesh, sharded[name].placements
                array = distribute_tensor(array, mesh, places, src_data_rank=None)
            arrays[name] = array
        return arrays

    def decode_array(self, node: Mapping[str, Any], array: Tensor, live: Leaf | None) -> Any:
        """A tensor on its live device, with the strides that it had, or a NumPy array.

        Sums over other strides round differently.

        Args:
            node: the description of the array in the checkpoint, as `add` has made it.
            array: what was read, in host memory.
            live: the leaf of the live state with this name, or None.
        """
        if node["kind"] == "numpy":
            return array.numpy()
        if "strides" in node:
            strided = torch.empty_strided(array.shape, node["strides"], dtype=array.dtype)
            array = strided.copy_(array)
        if live is not None:
            array = array.to(live.parts[""].device)
        return array

    def write_large(self, flat: FlatState, folder: Path) -> None:
        """Writes the tensors with DCP; the store synchronizes all files at the end.

        Args:
            flat: a state in host memory.
            folder: an empty directory, the same on all ranks.

        Raises:
            Exception: what a rank has raised, usually an OSError with its error number.
        """
        tensors = {name: _tensor(leaf) for name, leaf in flat.leaves.items()}
        writer = FileSystemWriter(folder, sync_files=False)
        # Of arrays that several ranks have, the lowest rank's is written. The buffers of a layer
        # may differ, and DistributedDataParallel sends those of its first rank to all ranks.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        try:
            save(tensors, storage_writer=writer, planner=planner, **self._options)
        except CheckpointException as error:
            # DCP's exception holds the errors of all ranks, and has no error number.
            failure = next(iter(error.failures.values()))[0]
        else:
            return
        raise failure  # here, where its context is still the error of the system

    def read_large(self, folder: Path, target: Target) -> dict[str, Tensor]:
        """Reads tensors, sharded like the live tensors, and parses DCP's index without pickle.

        Args:
            folder: the folder that `write_large` has written.
            target: the arrays to read, and the live state that receives them.

        Returns:
            Array name -> tensor in host memory; a DTensor on its own device.

        Raises:
            ProbeError: a file is missing, cut off, or not what was saved.
        """
        sharded = _sharded(target)
        index = run_on_each(self._ranks, lambda: read_index(folder))
        arrays: dict[str, Tensor] = {}
        for name, node in target.arrays.items():
            dtype = DTYPES[node["dtype"]]
            if name in sharded:
                arrays[name] = torch.empty_like(sharded[name], dtype=dtype)
            else:
                arrays[name] = torch.empty(node["shape"], dtype=dtype)
        read_tensors(folder, index, arrays, **self._options)
        return arrays


def _tensor(leaf: Leaf) -> Tensor:
    """The tensor or DTensor of a leaf in host memory."""
    memory = leaf.parts[""]
    part = torch.from_numpy(raw(memory)).view(DTYPES[leaf.dtype]).reshape(memory.shape[:-1])
    if leaf.layout is None:
        return part
    return DTensor(part, leaf.layout, requires_grad=False)


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
        if leaf is not None and leaf.layout is not None:
            like = DTensor(leaf.parts[""], leaf.layout, requires_grad=False)
        if isinstance(like, DTensor) and node["shape"] == list(like.shape):
            sharded[name] = like
    return sharded
