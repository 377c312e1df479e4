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
from healcore.torch.store.state import Leaf, flatten, subclass, typed, unpickled


@dataclass
class TorchSnapshot(Snapshot):
    """A torch state in host memory."""

    pinned: bool = False
    events: list[Any] = field(default_factory=list)
    """One event for each accelerator that is still copying."""

    def settle(self) -> None:
        """Waits for copies off an accelerator."""
        for event in self.events:
            event.synchronize()
        self.events.clear()

    def blocks(self) -> Iterator[Block]:
        """The bytes of every array."""
        return map(_block, self.flat.leaves.values())


class TorchCopier(Copier):
    """Copies torch states to host memory: pinned where CUDA is, without blocking the host.

    `rank` names the values that are saved per rank. `trust` pickles values without a plain form,
    and reads pickles.
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
        leaves: list[Leaf] = list(flat.leaves.values())
        pinned = any(leaf.tensor.is_cuda for leaf in leaves)
        old = recycled if recycled is not None and recycled.pinned == pinned else None
        need = sum(rounded(leaf.tensor.nbytes) for leaf in leaves)
        arena = Arena.reusing(old.arena if old else None, need, _pinned if pinned else None)
        copies = _places(leaves, arena, old)
        on_host = []
        for leaf, copy in zip(leaves, copies, strict=True):
            if leaf.tensor.device.type == "cpu":
                on_host.append((leaf.tensor, copy))
            else:
                _fill(leaf.tensor, copy)
        map_in_threads(lambda pair: _fill(*pair), on_host, sum(t.nbytes for t, _ in on_host))
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
        """Tensors in fresh host memory; DTensors on the device of the live ones."""
        saved: list[Leaf] = [leaf for name, leaf in snapshot.flat.leaves.items() if name in names]
        arrays = {}
        for leaf, raw in zip(saved, copy([_block(leaf) for leaf in saved]), strict=True):
            fresh = view(raw, leaf.tensor)
            if leaf.spec is not None:
                fresh = _dtensor(fresh.to(_device_in(live, leaf.name)), leaf.spec)
            arrays[leaf.name] = fresh
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
            return subclass(name, content, inner)
        tensor = arrays[content["name"]]
        if content["kind"] == "tensor":
            device = None if live is None else _device_in(live, content["name"])
            return typed(tensor if device is None else tensor.to(device), content, name)
        array = tensor.numpy().view(np.dtype(content["dtype"])).reshape(content["shape"])
        return array[()] if content["kind"] == "scalar" else array


def view(raw: np.ndarray, like: Tensor) -> Tensor:
    """Bytes, uint8 (n,), as a tensor of the shape, strides and dtype of `like`, a dense one."""
    return torch.from_numpy(raw).view(like.dtype).as_strided(like.shape, like.stride())


def _device_in(live: Flat, name: str) -> torch.device | None:
    """The device of an array of the live state, or None if it is not there."""
    leaf = live.leaves.get(name)
    return None if leaf is None else leaf.tensor.device


def _pinned(nbytes: int) -> np.ndarray:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def _places(leaves: list[Leaf], arena: Arena, recycled: TorchSnapshot | None) -> list[Leaf]:
    """Memory for the copies; the recycled memory if the state is laid out as before."""
    same_arena = recycled is not None and recycled.arena is arena
    old: list[Leaf] = list(recycled.flat.leaves.values()) if recycled and same_arena else []
    if [_layout(leaf) for leaf in old] == [_layout(leaf) for leaf in leaves]:
        return [copy._replace(spec=leaf.spec) for leaf, copy in zip(leaves, old, strict=True)]
    # A slice of a larger tensor becomes dense; any other layout stays.
    return [
        leaf._replace(
            tensor=view(
                arena.deal(leaf.tensor.nbytes), torch.empty_like(leaf.tensor, device="meta")
            )
        )
        for leaf in leaves
    ]


def _layout(leaf: Leaf) -> tuple[Any, ...]:
    tensor = leaf.tensor
    return leaf.name, leaf.dtype, tensor.dtype, tensor.shape, tensor.stride()


def _fill(source: Tensor, copy: Leaf) -> None:
    same_stride = source.stride() == copy.tensor.stride()
    if source.device.type == "cpu" and same_stride and source.numel():
        # Not copy_: its threads wait for each other after every tensor, which takes ten times as
        # long as the copy while a data loader uses their cores.
        np.copyto(_raw(copy.tensor), _raw(source))
    else:
        copy.tensor.copy_(source, non_blocking=source.is_cuda)


def _raw(tensor: Tensor) -> np.ndarray:
    """The bytes of a dense tensor on the host in memory order, uint8 (n,)."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy()


def _block(leaf: Leaf) -> Block:
    return Block(leaf.name, leaf.dtype, _raw(leaf.tensor))


def _dtensor(local: Tensor, spec: Any) -> Tensor:
    # Not DTensor.from_local: that moves the part to the mesh's device.
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)
