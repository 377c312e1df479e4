"""Copies of a torch state in host memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.runtime.store.copies import Copier
from healcore.runtime.store.host_memory import Arena, Block, CopyBlocks, rounded
from healcore.runtime.store.inspection import mapped
from healcore.runtime.store.structure import Flat
from healcore.torch.plain_values import value_of
from healcore.torch.store.state import Leaf, device_in, flatten, subclass, typed, unpickled


class HostTensor(NamedTuple):
    """One array in host memory."""

    name: str
    dtype: str
    raw: np.ndarray
    """uint8 (n,): its bytes, in memory order."""
    local: Tensor
    """The same memory as the tensor that was copied: shape, strides, dtype."""
    spec: Any

    @property
    def tensor(self) -> Tensor:
        """The tensor, a DTensor where it was one."""
        return self.local if self.spec is None else _dtensor(self.local, self.spec)

    @property
    def block(self) -> Block:
        """The bytes as a block."""
        return Block(self.name, self.dtype, self.raw)


@dataclass
class TorchSnapshot:
    """A torch state in host memory."""

    flat: Flat
    entries: list[HostTensor]
    arena: Arena
    pinned: bool = False
    events: list[Any] = field(default_factory=list)
    """One for each accelerator that is still copying."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.arena.nbytes

    def settle(self) -> None:
        """Waits for copies off an accelerator."""
        for event in self.events:
            event.synchronize()
        self.events.clear()

    def blocks(self) -> Iterator[Block]:
        """The bytes of every array."""
        return (each.block for each in self.entries)


class TorchCopier(Copier):
    """Copies torch states to host memory: pinned where CUDA is, without blocking the host.

    `rank` is for what is saved per rank. `trust` pickles what has no plain form, and reads pickles.
    """

    def __init__(self, rank: int = 0, *, trust: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.trust = trust

    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """The structure of a state and its tensors."""
        return flatten(state, self.rank, trust=self.trust or live)

    def take(
        self, state: Mapping[str, Any], recycled: TorchSnapshot | None = None
    ) -> TorchSnapshot:
        """A snapshot. On CUDA the copies are queued behind the work of the current stream."""
        flat = self.flatten(state)
        leaves = list(flat.leaves.values())
        pinned = any(leaf.tensor.is_cuda for leaf in leaves)
        arena = _arena(sum(rounded(leaf.tensor.nbytes) for leaf in leaves), pinned, recycled)
        entries = _places(leaves, arena, recycled)
        on_host = []
        for leaf, entry in zip(leaves, entries, strict=True):
            if leaf.tensor.device.type == "cpu":
                on_host.append((leaf, entry))
            else:
                _fill(leaf, entry)
        nbytes = sum(leaf.tensor.nbytes for leaf, _ in on_host)
        mapped(lambda pair: _fill(*pair), on_host, nbytes)
        snapshot = TorchSnapshot(flat._replace(leaves={}), entries, arena, pinned)
        for device in {leaf.tensor.device for leaf in leaves if leaf.tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            snapshot.events.append(event)
        return snapshot

    def arrays(self, snapshot: TorchSnapshot) -> dict[str, Tensor]:
        """The tensors in the snapshot's own memory."""
        return {each.name: each.tensor for each in snapshot.entries}

    def copies(
        self, snapshot: TorchSnapshot, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Tensor]:
        """Tensors in fresh host memory; DTensors on the device of the live ones."""
        saved = [each for each in snapshot.entries if each.name in names]
        arrays = {}
        for each, raw in zip(saved, copy([each.block for each in saved]), strict=True):
            fresh = view(raw, each.local)
            if each.spec is not None:
                fresh = _dtensor(fresh.to(device_in(live, each.name)), each.spec)
            arrays[each.name] = fresh
        return arrays

    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Tensor], live: Flat | None
    ) -> Any:
        """A tensor on its device, a value with a plain form, or with trust an unpickled object."""
        if tag == "pickle":
            return unpickled(name, content, self.trust)
        if tag == "torch":
            return value_of(content)
        if tag == "subclass":
            inner = functools.partial(self.fetch, name, arrays=arrays, live=live)
            return subclass(name, content, inner, self.trust)
        tensor = arrays[content["name"]]
        if content["kind"] == "tensor":
            device = None if live is None else device_in(live, content["name"])
            return typed(tensor if device is None else tensor.to(device), content, name)
        array = tensor.numpy().view(np.dtype(content["dtype"])).reshape(content["shape"])
        return array[()] if content["kind"] == "scalar" else array


def view(raw: np.ndarray, like: Tensor) -> Tensor:
    """Bytes, uint8 (n,), as a tensor of the shape, strides and dtype of `like`, a dense one."""
    return torch.from_numpy(raw).view(like.dtype).as_strided(like.shape, like.stride())


def _arena(nbytes: int, pinned: bool, recycled: TorchSnapshot | None) -> Arena:
    old = recycled.arena if recycled is not None and recycled.pinned == pinned else None
    if old is not None and old.reused(nbytes):
        return old
    return Arena(nbytes, _pinned if pinned else None)


def _pinned(nbytes: int) -> np.ndarray:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def _places(leaves: list[Leaf], arena: Arena, recycled: TorchSnapshot | None) -> list[HostTensor]:
    """Memory for the copies; the recycled one if the state is laid out as before."""
    old = recycled.entries if recycled is not None and recycled.arena is arena else []
    if len(old) == len(leaves) and all(map(_same_layout, leaves, old)):
        return [entry._replace(spec=leaf.spec) for leaf, entry in zip(leaves, old, strict=True)]
    return [_place(leaf, arena) for leaf in leaves]


def _same_layout(leaf: Leaf, entry: HostTensor) -> bool:
    a, b = leaf.tensor, entry.local
    return (leaf.name, leaf.dtype) == (entry.name, entry.dtype) and (
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )


def _place(leaf: Leaf, arena: Arena) -> HostTensor:
    """Memory for one copy. A slice of something larger becomes dense; another layout stays."""
    raw = arena.deal(leaf.tensor.nbytes)
    local = view(raw, torch.empty_like(leaf.tensor, device="meta"))
    return HostTensor(leaf.name, leaf.dtype, raw, local, leaf.spec)


def _fill(leaf: Leaf, entry: HostTensor) -> None:
    source = leaf.tensor
    if source.device.type == "cpu" and source.stride() == entry.local.stride() and len(entry.raw):
        # Not copy_: its threads wait for each other after every tensor, which takes ten times as
        # long as the copy when somebody else (a data loader) is using their cores.
        flat = source.as_strided((source.numel(),), (1,), source.storage_offset())
        np.copyto(entry.raw, flat.view(torch.uint8).numpy())
    else:
        entry.local.copy_(source, non_blocking=source.is_cuda)


def _dtensor(local: Tensor, spec: Any) -> Tensor:
    # Not DTensor.from_local: that moves the part to the mesh's device.
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)
