"""A torch state as JSON structure and named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from healcore.runtime.plain import pickled_text
from healcore.runtime.store import structure
from healcore.runtime.store.errors import StoreError, UnsavableState, no_plain_form
from healcore.torch.plain_values import node_of

HOW = "the store (or to the Healer that makes it)"


class Leaf(NamedTuple):
    """One array of a state, where it lives now."""

    name: str
    tensor: Tensor
    """A plain tensor on any device: of a DTensor its local part, of a NumPy array its bytes."""
    dtype: str
    """As the finite check knows it: "bfloat16"."""
    spread: Any = None
    """The DTensorSpec, if it is the local part of a DTensor."""


class Flat(NamedTuple):
    """A whole state."""

    entries: dict[str, dict[str, Any]]
    """Name -> {"tree": node, "stateful": bool, "per_rank": bool}; JSON-safe."""
    leaves: dict[str, Leaf]

    def device(self, name: str) -> torch.device | None:
        """Where an array lives; None if it is not in this state."""
        leaf = self.leaves.get(name)
        return None if leaf is None else leaf.tensor.device


def flatten(state: Mapping[str, Any], rank: int = 0, *, trust: bool = False) -> Flat:
    """Takes the arrays out of a state. Copies nothing.

    An object with `state_dict` is asked for it. One that also says ``per_rank = True`` (the state
    of a random generator, a data loader's position) has its arrays named by rank, because writers
    take arrays of the same name to be the same on every rank.

    Args:
        state: name -> tree, or object with `state_dict`.
        rank: of this process.
        trust: pickle what has no plain form.

    Raises:
        UnsavableState: something in it cannot be saved.
    """
    if not isinstance(state, Mapping) or not state:
        raise StoreError(
            f"the state to save maps names to what is saved, and holds something; not {state!r:.60}"
        )
    flattening = _Flattening(trust)
    entries = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise StoreError(f"names in the state are strings, not {name!r}")
        stateful = hasattr(value, "state_dict")
        per_rank = bool(getattr(value, "per_rank", False))
        tree = value.state_dict() if stateful else value
        path = (f"rank{rank}", name) if per_rank else (name,)
        node = flattening.encode(tree, path, ties=stateful)
        entries[name] = {"tree": node, "stateful": stateful, "per_rank": per_rank}
    return Flat(entries, flattening.leaves)


class _Flattening:
    """Collects the arrays while a tree is encoded."""

    def __init__(self, trust: bool) -> None:
        self._trust = trust
        self.leaves: dict[str, Leaf] = {}
        self._names = structure.Names()
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._ties = False

    def encode(self, tree: Any, path: tuple[Any, ...], *, ties: bool) -> structure.Node:
        """The node of one name.

        Args:
            tree: what is saved under it.
            path: of the tree.
            ties: save tensors that share memory once. For what `load_state_dict` copies from.
        """
        self._known.clear()
        self._ties = ties
        return structure.encode(tree, path, self._special)

    def _special(self, path: tuple[Any, ...], value: Any) -> structure.Node:
        """The node of what JSON does not have."""
        if isinstance(value, Tensor):
            value = value.detach()
            if _is_made_of_others(value):
                return {"subclass": self._subclass(path, value)}
            return {"array": self._tensor(path, value)}
        if isinstance(value, (np.ndarray, np.generic)) and _by_name(value.dtype):
            return {"array": self._numpy(path, np.asarray(value), isinstance(value, np.generic))}
        if (node := node_of(value)) is not None:
            return {"torch": node}
        # Schedulers and loaders keep whatever they like in their state: a partial, a path.
        return {"pickle": self._pickled(path, value)}

    def _subclass(self, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
        """A tensor made of others, such as torchao's moments of 8 bits: its parts, by name.

        As torch.compile takes it apart. It has no memory of its own. Its class is found again
        among those of the program that reads it; what the class keeps beside the parts (block
        sizes, dtypes) has to have a plain form.
        """
        if "<locals>" in type(value).__qualname__:
            raise UnsavableState(
                f"{structure.place(path)} is a {class_name(type(value))}, a class that the next "
                "process cannot find again: define it in a module"
            )
        names, context = value.__tensor_flatten__()
        return {
            "class": class_name(type(value)),
            "context": structure.encode(context, path, self._special, exact=True),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "parts": [[name, self._special((*path, name), getattr(value, name))] for name in names],
        }

    def _pickled(self, path: tuple[Any, ...], value: Any) -> str:
        if not self._trust:
            raise no_plain_form(structure.place(path), value, HOW)
        return pickled_text(path, value)

    def _tensor(self, path: tuple[Any, ...], value: Tensor) -> dict[str, Any]:
        spread = getattr(value, "_spec", None) if hasattr(value, "to_local") else None
        local = value.to_local() if spread is not None else value  # type: ignore[attr-defined]
        if is_traceable_wrapper_subclass(local):
            raise UnsavableState(
                f"{structure.place(path)} is a DTensor of {type(local).__name__}, whose parts have "
                "shapes of their own: nobody knows how they are sharded; use an optimizer with "
                "ordinary tensors for its moments under FSDP2"
            )
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            raise UnsavableState(
                f"{structure.place(path)} is a tensor of layout {local.layout} on {local.device}: "
                "only dense tensors with data can be saved; convert it first (to_dense())"
            )
        local = local.resolve_conj().resolve_neg()
        key = _identity(local)
        if self._ties and local.numel() and key in self._known:
            return self._known[key]
        node = {
            "name": self._names.at(path),
            "kind": "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
        self._known[key] = node
        self.leaves[node["name"]] = Leaf(node["name"], local, node["dtype"], spread)
        return node

    def _numpy(self, path: tuple[Any, ...], value: np.ndarray, scalar: bool) -> dict[str, Any]:
        """NumPy has dtypes that torch has not: its arrays go as bytes."""
        name = self._names.at(path)
        # Made writable by a copy where needed: torch warns about memory it may not write.
        raw = np.require(value, requirements=["C", "W"]).reshape(-1).view(np.uint8)
        self.leaves[name] = Leaf(name, torch.from_numpy(raw), value.dtype.name)
        return {
            "name": name,
            "kind": "scalar" if scalar else "numpy",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }


def class_name(kind: type) -> str:
    """How a class of tensors is told in a checkpoint."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_made_of_others(tensor: Any) -> bool:
    """Whether a tensor keeps its numbers in other tensors; a DTensor is known by itself."""
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "to_local")


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def _by_name(dtype: np.dtype) -> bool:
    """Whether the dtype can be named in a file: no objects, no fields, no foreign types."""
    return not dtype.hasobject and dtype.names is None and np.dtype(dtype.str) == dtype
