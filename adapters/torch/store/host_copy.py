"""Copies of a torch state in host memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.runtime.store.copies import Copier, Snapshot
from healcore.runtime.store.host_memory import Arena, Block, CopyBlocks, rounded
from healcore.runtime.store.inspection import map_in_threads
from healcore.runtime.store.structure import Flat
from healcore.torch.plain_values import value_of
from healcore.torch.store.state import Leaf, flatten, with_class, wrapper_tensor


@dataclass
class TorchSnapshot(Snapshot):
    """A copy of a torch state in host memory."""

    pinned: bool = False
    events: list[Any] = field(default_factory=list)
    """The CUDA event of each device that may still be copying."""

    def settle(self) -> None:
        """Waits until copies from an accelerator are complete."""
        for event in self.events:
            event.synchronize()
        self.events.clear()

    def blocks(self) -> Iterator[Block]:
        """The bytes of every array."""
        return map(_block, self.flat.leaves.values())


class TorchCopier(Copier):
    """Copies torch states to host memory. Copies from CUDA go to pinned memory, without a sync.

    `rank` is part of the names of per-rank values.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """Splits a state into JSON and tensors. See `Copier.flatten`."""
        return flatten(state, self.rank, live=live)

    def take(
        self, state: Mapping[str, Any], recycled: TorchSnapshot | None = None
    ) -> TorchSnapshot:
        """Copies a state. On CUDA the copies run after the current stream's pending work."""
        flat = self.flatten(state)
        leaves: list[Leaf] = list(flat.leaves.values())
        pinned = any(leaf.tensor.is_cuda for leaf in leaves)
        old = recycled if recycled is not None and recycled.pinned == pinned else None
        size = sum(rounded(leaf.tensor.nbytes) for leaf in leaves)
        arena = Arena.reusing(old.arena if old else None, size, _pinned_memory if pinned else None)
        copies = _allocate(leaves, arena, old)
        on_host = []
        for leaf, copy in zip(leaves, copies, strict=True):
            if leaf.tensor.device.type == "cpu":
                on_host.append((leaf.tensor, copy))
            else:
                _copy_into(leaf.tensor, copy)
        map_in_threads(
            lambda pair: _copy_into(*pair), on_host, sum(tensor.nbytes for tensor, _ in on_host)
        )
        flat = flat._replace(leaves={copy.name: copy for copy in copies})
        snapshot = TorchSnapshot(flat, arena, pinned)
        for device in {leaf.tensor.device for leaf in leaves if leaf.tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            snapshot.events.append(event)
        return snapshot

    def arrays(self, snapshot: TorchSnapshot) -> dict[str, Tensor]:
        """The tensors in the snapshot's own memory."""
        return {
            leaf.name: leaf.tensor if leaf.spec is None else _dtensor(leaf.tensor, leaf.spec)
            for leaf in snapshot.flat.leaves.values()
        }

    def copies(
        self, snapshot: TorchSnapshot, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Tensor]:
        """Copies tensors to new host memory, and DTensors to the device of the live DTensors."""
        saved: list[Leaf] = [leaf for name, leaf in snapshot.flat.leaves.items() if name in names]
        arrays = {}
        for leaf, raw in zip(saved, copy([_block(leaf) for leaf in saved]), strict=True):
            fresh = view_as(raw, leaf.tensor)
            if leaf.spec is not None:
                fresh = _dtensor(fresh.to(_live_device(live, leaf.name)), leaf.spec)
            arrays[leaf.name] = fresh
        return arrays

    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Tensor], live: Flat | None
    ) -> Any:
        """Decodes a tensor on its live device, or a value of torch."""
        if tag == "torch":
            return value_of(content)
        if tag == "subclass":
            inner = functools.partial(self.fetch, name, arrays=arrays, live=live)
            return wrapper_tensor(name, content, inner)
        tensor = arrays[content["name"]]
        if content["kind"] == "tensor":
            device = None if live is None else _live_device(live, content["name"])
            return with_class(tensor if device is None else tensor.to(device), content, name)
        array = tensor.numpy().view(np.dtype(content["dtype"])).reshape(content["shape"])
        return array[()] if content["kind"] == "scalar" else array


def view_as(raw: np.ndarray, like: Tensor) -> Tensor:
    """Views bytes, uint8 (n,), with the dtype, shape and strides of the dense tensor `like`."""
    return torch.from_numpy(raw).view(like.dtype).as_strided(like.shape, like.stride())


def _live_device(live: Flat, name: str) -> torch.device | None:
    """The device of an array in the live state, or None if the array is absent."""
    leaf = live.leaves.get(name)
    return None if leaf is None else leaf.tensor.device


def _pinned_memory(nbytes: int) -> np.ndarray:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def _allocate(leaves: list[Leaf], arena: Arena, recycled: TorchSnapshot | None) -> list[Leaf]:
    """Memory for the copies. Reuses `recycled` if its tensors have the same layout."""
    same_arena = recycled is not None and recycled.arena is arena
    old: list[Leaf] = list(recycled.flat.leaves.values()) if recycled and same_arena else []
    if [_layout(leaf) for leaf in old] == [_layout(leaf) for leaf in leaves]:
        return [copy._replace(spec=leaf.spec) for leaf, copy in zip(leaves, old, strict=True)]
    # A slice of a larger tensor becomes dense; other layouts are unchanged.
    return [
        leaf._replace(
            tensor=view_as(
                arena.deal(leaf.tensor.nbytes), torch.empty_like(leaf.tensor, device="meta")
            )
        )
        for leaf in leaves
    ]


def _layout(leaf: Leaf) -> tuple[Any, ...]:
    tensor = leaf.tensor
    return leaf.name, leaf.dtype, tensor.dtype, tensor.shape, tensor.stride()


def _copy_into(source: Tensor, copy: Leaf) -> None:
    same_stride = source.stride() == copy.tensor.stride()
    if source.device.type == "cpu" and same_stride and source.numel():
        # Rejected: copy_, whose threads wait for each other after every tensor. While a data loader
        # uses their cores, the wait takes ten times as long as the copy.
        np.copyto(_bytes_of(copy.tensor), _bytes_of(source))
    else:
        copy.tensor.copy_(source, non_blocking=source.is_cuda)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a dense host tensor in memory order, uint8 (n,)."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy()


def _block(leaf: Leaf) -> Block:
    return Block(leaf.name, leaf.dtype, _bytes_of(leaf.tensor))


def _dtensor(local: Tensor, spec: Any) -> Tensor:
    # Rejected: DTensor.from_local, which moves the part to the mesh's device.
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)
