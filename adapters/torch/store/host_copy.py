"""Copies of a torch state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.runtime.store.digest import mapped
from healcore.runtime.store.protocol import wanted
from healcore.runtime.store.snapshot import Arena, Block, rounded
from healcore.runtime.store.structure import arrays_of
from healcore.torch.store.assembling import assemble, checked
from healcore.torch.store.flattening import Leaf, flatten


class Entry(NamedTuple):
    """One array in host memory."""

    name: str
    dtype: str
    raw: np.ndarray
    """uint8 (n,): its bytes, in the order they lie in."""
    local: Tensor
    """The same memory as the tensor that was copied: shape, strides, dtype."""
    spread: Any

    @property
    def tensor(self) -> Tensor:
        """The tensor, a DTensor where it was one."""
        return self.local if self.spread is None else _dtensor(self.local, self.spread)


@dataclass
class TorchSnapshot:
    """A state in host memory."""

    structure: dict[str, dict[str, Any]]
    entries: list[Entry]
    arena: Arena | None
    """None where the memory belongs to somebody else."""
    pinned: bool = False
    events: list[Any] = field(default_factory=list)
    """One for each accelerator that is still copying."""

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return self.arena.nbytes if self.arena else sum(len(each.raw) for each in self.entries)

    def settle(self) -> None:
        """Waits for copies off an accelerator."""
        for event in self.events:
            event.synchronize()
        self.events.clear()

    def blocks(self) -> Iterator[Block]:
        """The bytes of every array."""
        return (Block(each.name, each.dtype, each.raw) for each in self.entries)


class TorchCopier:
    """Copies torch states to host memory: pinned where CUDA is, without holding up the host.

    Args:
        rank: of this process, for what is saved per rank.
        trust: take what has no plain form, as a pickle.
    """

    def __init__(self, rank: int = 0, *, trust: bool = False) -> None:
        self.rank = rank
        self.trust = trust

    def take(
        self, state: Mapping[str, Any], recycled: TorchSnapshot | None = None
    ) -> TorchSnapshot:
        """A snapshot. On CUDA the copies are queued behind the work of the current stream."""
        flat = flatten(state, self.rank, trust=self.trust)
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
        snapshot = TorchSnapshot(flat.entries, entries, arena, pinned)
        for device in {leaf.tensor.device for leaf in leaves if leaf.tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            snapshot.events.append(event)
        return snapshot

    def borrow(self, state: Mapping[str, Any]) -> TorchSnapshot:
        """The same form without a copy, of host tensors that nobody changes."""
        flat = flatten(state, self.rank, trust=self.trust)
        return TorchSnapshot(flat.entries, [_borrowed(leaf) for leaf in flat.leaves.values()], None)

    def give(
        self,
        snapshot: TorchSnapshot,
        like: Mapping[str, Any],
        copy: Callable[[Sequence[Block]], list[np.ndarray]],
    ) -> dict[str, Any]:
        """The state in fresh memory; trees on the devices of `like`, the rest on the host."""
        like = wanted(snapshot.structure, like)
        if not like:
            return {}
        live = checked(None, snapshot.structure, like, self.rank)
        entries = {name: snapshot.structure[name] for name in like}
        needed = {node["name"] for each in entries.values() for node in arrays_of(each["tree"])}
        saved = [each for each in snapshot.entries if each.name in needed]
        copies = copy([Block(each.name, each.dtype, each.raw) for each in saved])
        arrays = {}
        for each, raw in zip(saved, copies, strict=True):
            fresh = view(raw, each.local)
            if each.spread is not None:
                fresh = _dtensor(fresh.to(live.device(each.name)), each.spread)
            arrays[each.name] = fresh
        return assemble(entries, arrays, like, live.device, trust=True)  # of this process

    def held(self, snapshot: TorchSnapshot) -> dict[str, Any]:
        """The state in the snapshot's own memory."""
        arrays = {each.name: each.tensor for each in snapshot.entries}
        nothing = dict.fromkeys(snapshot.structure)
        trees = assemble(snapshot.structure, arrays, nothing, trust=True)
        return {
            name: HeldState(tree, snapshot.structure[name]["per_rank"])
            if snapshot.structure[name]["stateful"]
            else tree
            for name, tree in trees.items()
        }


class HeldState:
    """Stands for an object with `state_dict`, of which only that is left."""

    def __init__(self, state: Any, per_rank: bool) -> None:
        self._state = state
        self.per_rank = per_rank

    def state_dict(self) -> Any:
        """What the object's was."""
        return self._state


def view(raw: np.ndarray, like: Tensor) -> Tensor:
    """Bytes as a tensor.

    Args:
        raw: uint8 (n,).
        like: gives shape, strides and dtype; it is dense.
    """
    return torch.from_numpy(raw).view(like.dtype).as_strided(like.shape, like.stride())


def _arena(nbytes: int, pinned: bool, recycled: TorchSnapshot | None) -> Arena:
    """Memory for a snapshot: that of the recycled one if it is large enough and not far larger."""
    old = recycled.arena if recycled is not None and recycled.pinned == pinned else None
    if old is not None and nbytes <= old.nbytes <= 2 * nbytes:
        old.reset()
        return old
    return Arena(nbytes, _pinned if pinned else None)


def _pinned(nbytes: int) -> np.ndarray:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def _places(leaves: list[Leaf], arena: Arena, recycled: TorchSnapshot | None) -> list[Entry]:
    """Memory for the copies. That of the same state is dealt out already."""
    old = recycled.entries if recycled is not None and recycled.arena is arena else []
    if len(old) == len(leaves) and all(map(_same_layout, leaves, old)):
        return [entry._replace(spread=leaf.spread) for leaf, entry in zip(leaves, old, strict=True)]
    return [_place(leaf, arena) for leaf in leaves]


def _same_layout(leaf: Leaf, entry: Entry) -> bool:
    a, b = leaf.tensor, entry.local
    return (leaf.name, leaf.dtype) == (entry.name, entry.dtype) and (
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )


def _place(leaf: Leaf, arena: Arena) -> Entry:
    """A slice of something larger becomes dense, a layout stays."""
    raw = arena.deal(leaf.tensor.nbytes)
    local = view(raw, torch.empty_like(leaf.tensor, device="meta"))
    return Entry(leaf.name, leaf.dtype, raw, local, leaf.spread)


def _fill(leaf: Leaf, entry: Entry) -> None:
    """Copies."""
    source = leaf.tensor
    if source.device.type == "cpu" and source.stride() == entry.local.stride() and len(entry.raw):
        # Not copy_: its threads wait for each other after every tensor, which takes ten times as
        # long as the copy when somebody else (a data loader) is using their cores.
        flat = source.as_strided((source.numel(),), (1,), source.storage_offset())
        np.copyto(entry.raw, flat.view(torch.uint8).numpy())
    else:
        entry.local.copy_(source, non_blocking=source.is_cuda)


def _borrowed(leaf: Leaf) -> Entry:
    local = leaf.tensor.cpu()
    raw = local.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Entry(leaf.name, leaf.dtype, raw, local, leaf.spread)


def _dtensor(local: Tensor, spread: Any) -> Tensor:
    # Not DTensor.from_local: that moves the part to the mesh's device.
    from torch.distributed.tensor import DTensor

    return DTensor(local, spread, requires_grad=False)
