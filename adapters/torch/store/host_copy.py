"""Copies a torch state to host memory and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.runtime.store import structure
from healcore.runtime.store.copies import Copier
from healcore.runtime.store.host_memory import allocate
from healcore.runtime.store.inspection import map_in_threads
from healcore.runtime.store.structure import Flat, Leaf
from healcore.torch.live_state import identities
from healcore.torch.plain_values import value_of
from healcore.torch.store.state import Flattener, with_class


class TorchCopier(Copier):
    """Copies torch states to host memory. Copies from CUDA go to pinned memory, without a sync.

    `rank` is part of the names of per-rank values.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def flatten(self, state: Mapping[str, Any]) -> Flat:
        """Splits a state into JSON and tensors. See `Copier.flatten`."""
        flattener, named = Flattener(self.rank), structure.checked_names(state)
        entries = {name: flattener.entry(name, value) for name, value in named.items()}
        for name, identity in identities(state).items():
            entries[name]["identity"] = identity
        return Flat(entries, flattener.leaves, {})

    def copy_parts(
        self, parts: Sequence[Tensor], old: Sequence[Tensor]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Copies tensors. On CUDA the copies run after the current stream's pending work."""
        # A slice of a larger tensor becomes dense; other layouts are unchanged.
        dense = [torch.empty_like(part, device="meta") for part in parts]
        copies = list(old)
        if list(map(_layout, old)) != list(map(_layout, dense)):
            pinned = any(part.is_cuda for part in parts)
            new = _pinned_memory if pinned else allocate
            copies = [self.view(new(part.nbytes), part) for part in dense]
        on_host = []
        for part, copy in zip(parts, copies, strict=True):
            if part.device.type != "cpu":
                copy.copy_(part, non_blocking=part.is_cuda)
            elif part.numel() and part.stride() == copy.stride():
                # Rejected: copy_, whose threads wait for each other after every tensor. While a
                # data loader uses their cores, the wait takes ten times as long as the copy.
                on_host.append((self.raw(copy), self.raw(part)))
            else:
                copy.copy_(part)
        nbytes = sum(source.nbytes for _, source in on_host)
        map_in_threads(lambda pair: np.copyto(*pair), on_host, nbytes)
        events = []
        for device in {part.device for part in parts if part.is_cuda}:
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(device))

        def wait() -> None:
            for event in events:
                event.synchronize()

        return copies, wait

    def raw(self, part: Tensor) -> np.ndarray:
        """The bytes of a dense host tensor in memory order, uint8 (n,)."""
        flat = part.as_strided((part.numel(),), (1,), part.storage_offset())
        return flat.view(torch.uint8).numpy()

    def view(self, raw: np.ndarray, part: Tensor) -> Tensor:
        """Views bytes, uint8 (n,), with the dtype, shape and strides of a dense tensor."""
        return torch.from_numpy(raw).view(part.dtype).as_strided(part.shape, part.stride())

    def array(self, leaf: Leaf, live: Leaf | None) -> Tensor:
        """The tensor, or a DTensor whose part is on the device of the live part."""
        part, spec = leaf.parts[""], leaf.layout
        if spec is None:
            return part
        # Rejected: DTensor.from_local, which moves the part to the mesh's device.
        from torch.distributed.tensor import DTensor

        part = part if live is None else part.to(live.parts[""].device)
        return DTensor(part, spec, requires_grad=False)

    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Tensor], live: Flat | None
    ) -> Any:
        """Decodes a tensor on its live device, or a value of torch."""
        if tag == "torch":
            return value_of(content)
        tensor = arrays[content["name"]]
        if content["kind"] == "tensor":
            leaf = None if live is None else live.leaves.get(content["name"])
            tensor = tensor if leaf is None else tensor.to(leaf.parts[""].device)
            return with_class(tensor, content, name)
        array = tensor.numpy().view(np.dtype(content["dtype"])).reshape(content["shape"])
        return array[()] if content["kind"] == "scalar" else array


def _pinned_memory(nbytes: int) -> np.ndarray:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
