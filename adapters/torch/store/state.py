"""Converts a torch state to JSON and named arrays, and loads a restored state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from healcore.runtime.store import structure
from healcore.runtime.store.errors import (
    StateMismatch,
    StoreError,
    UnsavableState,
)
from healcore.runtime.store.structure import Leaf
from healcore.torch.plain_values import node_of


class Flattener:
    """Encodes values as JSON, and collects their arrays without copies.

    The part of a leaf is a plain tensor on any device: the tensor, the local part of a DTensor, or
    the bytes of a NumPy array. The layout is the DTensorSpec of a DTensor, else None.

    Writers assume that arrays of one name are equal on every rank. So arrays of an object with
    ``per_rank = True`` (a random generator, a data loader) have the rank in their names.
    """

    def __init__(self, rank: int) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._names = structure.Names()
        self._rank = rank
        self._encoded: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._deduplicates = False

    def entry(self, name: str, value: Any) -> dict[str, Any]:
        """The entry of a value of the state; UnsavableState for an unsavable value."""
        stateful = hasattr(value, "state_dict")
        per_rank = bool(structure.attribute(value, "per_rank"))
        tree = value.state_dict() if stateful else value
        path = (f"rank{self._rank}", name) if per_rank else (name,)
        # `load_state_dict` copies from tensors, so tensors with the same memory are saved once.
        self._encoded.clear()
        self._deduplicates = stateful
        node = structure.encode(tree, path, self._encode)
        return {"tree": node, "stateful": stateful, "per_rank": per_rank}

    def _encode(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
        if isinstance(value, Tensor):
            return {"array": self._encode_tensor(path, value.detach()) | _class_node(value)}
        is_array = type(value) is np.ndarray or isinstance(value, np.generic)
        if is_array and _is_portable(value.dtype):
            return {"array": self._encode_numpy(path, value)}
        node = node_of(value)
        return None if node is None else {"torch": node}

    def _encode_tensor(self, path: tuple[Any, ...], value: Tensor) -> dict[str, Any]:
        spec = getattr(value, "_spec", None) if hasattr(value, "to_local") else None
        local = value.to_local() if spec is not None else value  # type: ignore[attr-defined]
        if is_traceable_wrapper_subclass(local):
            raise UnsavableState(
                f"{structure.place(path)} is a {type(local).__name__}, which holds its values in "
                "other tensors: use an optimizer with ordinary tensors for its moments"
            )
        if local.layout is not torch.strided or local.is_quantized or local.is_meta:
            raise UnsavableState(
                f"{structure.place(path)} is a tensor of layout {local.layout} on {local.device}: "
                "only dense tensors with data can be saved; convert it first (to_dense())"
            )
        local = local.as_subclass(Tensor).resolve_conj().resolve_neg()
        key = _memory_key(local)
        if self._deduplicates and local.numel() and key in self._encoded:
            return self._encoded[key]
        node = {
            "name": self._names.at(path),
            "kind": "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
        self._encoded[key] = node
        self.leaves[node["name"]] = Leaf(node["name"], node["dtype"], {"": local}, spec)
        return node

    def _encode_numpy(self, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
        """Encodes a NumPy array or scalar as bytes, because NumPy has dtypes that torch lacks."""
        name = self._names.at(path)
        # Copies read-only arrays, because torch warns about memory that it cannot write.
        raw = np.require(value, requirements=["C", "W"]).reshape(-1).view(np.uint8)
        self.leaves[name] = Leaf(name, value.dtype.name, {"": torch.from_numpy(raw)})
        return {
            "name": name,
            "kind": "scalar" if isinstance(value, np.generic) else "numpy",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }


def _class_node(tensor: Tensor) -> dict[str, Any]:
    """The entries of a tensor's node for its class; empty for a plain tensor and a DTensor."""
    if type(tensor) is nn.Parameter:
        return {"parameter": tensor.requires_grad}
    if type(tensor) is Tensor or hasattr(tensor, "to_local"):
        return {}
    return {"class": structure.class_name(type(tensor))}


def with_class(tensor: Tensor, node: Mapping[str, Any], name: str) -> Tensor:
    """Converts a restored plain tensor to the class in its node."""
    if "parameter" in node:
        return nn.Parameter(tensor, requires_grad=bool(node["parameter"]))
    if "class" in node:
        return tensor.as_subclass(_tensor_class(node["class"], name))
    return tensor


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def _is_portable(dtype: np.dtype) -> bool:
    """Whether a file can name the dtype: no objects, no fields, no other package's types."""
    return not dtype.hasobject and dtype.names is None and np.dtype(dtype.str) == dtype


def _tensor_class(name: str, place: str) -> Any:
    """The newest tensor class with this name in this program. Imports nothing."""
    classes = [each for each in structure.subclasses(Tensor) if structure.class_name(each) == name]
    if not classes:
        raise StoreError(
            f"{structure.place((place,))} holds a {name:.200}, but this program has no such tensor "
            "class: import the package that defines it, then restore"
        )
    return classes[-1]


def apply(live: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Loads every restored value into the live object of the same name.

    Calls `load_state_dict` if the object has it. Overwrites tensors in place, also in dictionaries
    and lists. Replaces other values. Checks as much as possible before the first change.

    Args:
        live: name -> live object.
        restored: name -> restored value, `Restored.state`.

    Raises:
        StateMismatch: the state does not fit; nothing was changed.
    """
    wrong = [f'there is no live "{name}"' for name in restored if name not in live]
    for name, state in restored.items():
        if name in live:
            wrong += _mismatches(name, live[name], state)
    if wrong:
        raise StateMismatch(None, wrong)
    for name, state in restored.items():
        if hasattr(live[name], "load_state_dict"):
            live[name].load_state_dict(state)
        else:
            _overwrite(live[name], state)


def _mismatches(name: str, live: Any, state: Any) -> list[str]:
    wrong, pairs = [], [(name, live, state)]
    if isinstance(live, nn.Module):
        own = live.state_dict()
        wrong = [f"{name}.{key} is not in both states" for key in own.keys() ^ state.keys()]
        pairs = [(f"{name}.{key}", own[key], state[key]) for key in own.keys() & state.keys()]
    elif hasattr(live, "load_state_dict"):
        return []  # a restore has compared its identity
    elif not isinstance(live, dict | list) and not (
        isinstance(live, Tensor) and isinstance(state, Tensor)
    ):
        wrong = [f'"{name}" is a {type(live).__name__}, which cannot be changed in place']
    for place, old, new in pairs:
        if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape != new.shape:
            wrong.append(f"{place} has the shape {tuple(new.shape)}, not {tuple(old.shape)}")
    return sorted(wrong)


@torch.no_grad()
def _overwrite(live: Any, state: Any) -> None:
    """Makes `live` equal to `state`, keeping its tensors."""
    if isinstance(live, Tensor):
        live.copy_(state)
    elif isinstance(live, dict):
        for key in [key for key in live if key not in state]:
            del live[key]
        for key, value in state.items():
            live[key] = _overwritten(live.get(key), value)
    else:
        padded = live[: len(state)] + [None] * (len(state) - len(live))
        live[:] = [_overwritten(old, new) for old, new in zip(padded, state, strict=True)]


def _overwritten(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        return old.copy_(new)
    if type(old) is type(new) and isinstance(old, (dict, list)):
        _overwrite(old, new)
        return old
    return new
