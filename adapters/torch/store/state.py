"""Converts a torch state to JSON and named arrays, and loads a restored state."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from healcore.runtime.json_codec import pickled_text
from healcore.runtime.store import structure
from healcore.runtime.store.errors import (
    StateMismatch,
    StoreError,
    UnsavableState,
    pickle_error,
    unsavable_error,
)
from healcore.runtime.store.structure import Flat
from healcore.torch.live_state import identities
from healcore.torch.plain_values import node_of

HOW = "the store (or to the Healer that makes it)"


class Leaf(NamedTuple):
    """One array of a state."""

    name: str
    tensor: Tensor
    """A plain tensor on any device: a DTensor's local part, a NumPy array's bytes."""
    dtype: str
    """Name as in the finite check: "bfloat16"."""
    spec: Any = None
    """The DTensorSpec if the tensor is the local part of a DTensor."""


def flatten(state: Mapping[str, Any], rank: int = 0, *, trust: bool = False) -> Flat:
    """Takes the arrays out of a state, without copies; UnsavableState for an unsavable value.

    Arrays of an object with ``per_rank = True`` (the state of a random generator, a data loader's
    position) are named by rank, because writers assume that arrays of one name are the same on
    every rank. `trust` pickles values without a plain form.
    """
    flattening = _Flattening(rank, trust)
    entries = {
        name: flattening.entry(name, value)
        for name, value in structure.checked_names(state).items()
    }
    for name, identity in identities(state).items():
        entries[name]["identity"] = identity
    return Flat(entries, flattening.leaves, {})


class _Flattening:
    """Collects the arrays while a tree is encoded."""

    def __init__(self, rank: int, trust: bool) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._names = structure.Names()
        self._rank = rank
        self._trust = trust
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._ties = False

    def entry(self, name: str, value: Any) -> dict[str, Any]:
        stateful = hasattr(value, "state_dict")
        per_rank = bool(getattr(value, "per_rank", False))
        tree = value.state_dict() if stateful else value
        path = (f"rank{self._rank}", name) if per_rank else (name,)
        # Tensors that share memory are saved once if `load_state_dict` copies from them.
        self._known.clear()
        self._ties = stateful
        node = structure.encode(tree, path, self._special)
        return {"tree": node, "stateful": stateful, "per_rank": per_rank}

    def _special(self, path: tuple[Any, ...], value: Any) -> structure.Node:
        if isinstance(value, Tensor):
            plain = value.detach()
            if _is_made_of_others(plain):
                return {"subclass": self._subclass(path, plain)}
            kind = _type_of(value)
            if "class" in kind:  # the file must hold a plain tensor
                plain = plain.as_subclass(Tensor)
            return {"array": self._tensor(path, plain) | kind}
        is_array = type(value) is np.ndarray or isinstance(value, np.generic)
        if is_array and _by_name(value.dtype):
            return {"array": self._numpy(path, np.asarray(value), isinstance(value, np.generic))}
        if (node := node_of(value)) is not None:
            return {"torch": node}
        # Schedulers and loaders may keep any object in their state: a partial, a path.
        if not self._trust:
            raise unsavable_error(structure.place(path), value, HOW)
        return {"pickle": pickled_text(path, value)}

    def _subclass(self, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
        """The parts of a tensor that is made of others, such as torchao's moments of 8 bits.

        The tensor is taken apart as by torch.compile. The program that reads it must have its
        class. The context of the class (block sizes, dtypes) must have a plain form.
        """
        if "<locals>" in type(value).__qualname__:
            raise UnsavableState(
                f"{structure.place(path)} is a {structure.class_name(type(value))}, a class that "
                "the next process cannot find again: define it in a module"
            )
        names, context = value.__tensor_flatten__()
        return {
            "class": structure.class_name(type(value)),
            "context": structure.encode(context, path, self._special),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "parts": [[name, self._special((*path, name), getattr(value, name))] for name in names],
        }

    def _tensor(self, path: tuple[Any, ...], value: Tensor) -> dict[str, Any]:
        spec = getattr(value, "_spec", None) if hasattr(value, "to_local") else None
        local = value.to_local() if spec is not None else value  # type: ignore[attr-defined]
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
        self.leaves[node["name"]] = Leaf(node["name"], local, node["dtype"], spec)
        return node

    def _numpy(self, path: tuple[Any, ...], value: np.ndarray, scalar: bool) -> dict[str, Any]:
        """A NumPy array as bytes, because NumPy has dtypes that torch lacks."""
        name = self._names.at(path)
        # Copies read-only arrays: torch warns about memory that it may not write.
        raw = np.require(value, requirements=["C", "W"]).reshape(-1).view(np.uint8)
        self.leaves[name] = Leaf(name, torch.from_numpy(raw), value.dtype.name)
        return {
            "name": name,
            "kind": "scalar" if scalar else "numpy",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }


def _type_of(tensor: Tensor) -> dict[str, Any]:
    """The class of a tensor for its node; empty for a plain tensor and a DTensor."""
    if type(tensor) is nn.Parameter:
        return {"parameter": tensor.requires_grad}
    if type(tensor) is Tensor or hasattr(tensor, "to_local"):
        return {}
    return {"class": structure.class_name(type(tensor))}


def typed(tensor: Tensor, node: Mapping[str, Any], name: str) -> Tensor:
    """A restored tensor with the class in its node."""
    if "parameter" in node:
        return nn.Parameter(tensor, requires_grad=bool(node["parameter"]))
    if "class" in node:
        return tensor.as_subclass(tensor_class(node["class"], name, made_of_others=False))
    return tensor


def _is_made_of_others(tensor: Any) -> bool:
    """Whether a tensor keeps its numbers in other tensors; False for a DTensor."""
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
    """Whether a file can name the dtype: no objects, no fields, no foreign types."""
    return not dtype.hasobject and dtype.names is None and np.dtype(dtype.str) == dtype


def unpickled(name: str, content: str, trust: bool) -> Any:
    """A pickled object; Untrusted without `trust`."""
    if not trust:
        raise pickle_error(f"something in {structure.place((name,))}", HOW)
    return pickle.loads(base64.b64decode(content))


def subclass(name: str, content: Any, fetch: structure.Fetch) -> Any:
    """A tensor made of others. Its class must be defined in this program; imports nothing."""
    context = structure.decode(content["context"], fetch)
    kind = tensor_class(content["class"], name, made_of_others=True)
    parts = {part: structure.decode(node, fetch) for part, node in content["parts"]}
    shape, stride = torch.Size(content["shape"]), tuple(content["stride"])
    return kind.__tensor_unflatten__(parts, context, shape, stride)


def tensor_class(name: str, place: str, *, made_of_others: bool) -> Any:
    """The newest class of tensors of this name in this program; imports nothing."""
    found = [
        kind
        for kind in structure.subclasses(Tensor)
        if structure.class_name(kind) == name
        and hasattr(kind, "__tensor_unflatten__") == made_of_others
    ]
    if not found:
        raise StoreError(
            f"{structure.place((place,))} holds a {name:.200}, which is no class of tensors in "
            "this program: import the package that defines it, then restore"
        )
    return found[-1]


def apply(live: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Loads every restored name into the live object of that name.

    Calls `load_state_dict` of objects that have it. Overwrites tensors, alone or in dictionaries
    and lists, in place; replaces other values. Checks as much as possible before the first change.

    Args:
        live: the objects that were saved.
        restored: `Restored.state`.

    Raises:
        StateMismatch: the state does not fit; nothing was changed.
    """
    wrong = [f'there is no live "{name}"' for name in restored if name not in live]
    for name, state in restored.items():
        if name in live:
            wrong += _unfit(name, live[name], state)
    if wrong:
        raise StateMismatch(None, wrong)
    for name, state in restored.items():
        if hasattr(live[name], "load_state_dict"):
            live[name].load_state_dict(state)
        else:
            _overwrite(live[name], state)


def _unfit(name: str, live: Any, state: Any) -> list[str]:
    if isinstance(live, nn.Module):
        return _unfit_tensors(name, live.state_dict(), state)
    if isinstance(live, torch.optim.Optimizer):
        if not isinstance(state, Mapping) or "param_groups" not in state:
            return [f"{name} is not of an optimizer in it"]
        here = [len(group["params"]) for group in live.param_groups]
        there = [len(group["params"]) for group in state["param_groups"]]
        if here != there:
            return [f"{name} has groups of {there} parameters in it, {here} in the live state"]
        return []
    if hasattr(live, "load_state_dict"):
        return []
    if isinstance(live, Tensor) and isinstance(state, Tensor):
        return [] if live.shape == state.shape else [f"{name} has another shape"]
    if not isinstance(live, (dict, list)):
        return [f'"{name}" is a {type(live).__name__}, which cannot be changed in place']
    return []


def _unfit_tensors(name: str, live: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    wrong = [f"{name}.{key} is only in one of them" for key in live.keys() ^ state.keys()]
    for key in live.keys() & state.keys():
        a, b = state[key], live[key]
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
            wrong.append(f"{name}.{key} is {tuple(a.shape)} in it, {tuple(b.shape)} in the module")
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
            live[key] = _replaced(live.get(key), value)
    else:
        padded = live[: len(state)] + [None] * (len(state) - len(live))
        live[:] = [_replaced(old, new) for old, new in zip(padded, state, strict=True)]


def _replaced(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        return old.copy_(new)
    if type(old) is type(new) and isinstance(old, (dict, list)):
        _overwrite(old, new)
        return old
    return new
