"""Converts a torch state and its values to JSON and named arrays, and loads a restored state.

Names from a file are looked up in tables, never with `getattr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StateMismatch, UnsavableState
from healcore.runtime.store.flat_state import FlatState
from healcore.torch import generators


class Layout(NamedTuple):
    """How the bytes of a leaf make a tensor.

    Attributes:
        dense: a tensor without memory (on the device "meta"), with the dtype, the shape and the
            dense strides of this process's part.
        spec: the DTensorSpec (mesh, placements, whole shape) of a DTensor, or None for a tensor.
    """

    dense: Tensor
    spec: Any = None


def add_entry(flat: FlatState, name: str, value: Any, rank: int) -> None:
    """Adds the entry of a value of the state to `flat`, and its arrays, without copies.

    The part of a leaf, at "", is a plain tensor on any device: the tensor, the local part of a
    DTensor, or the bytes of a NumPy array.

    Writers assume that arrays of one name are equal on every rank. So arrays of an object with
    ``per_rank = True`` (a data loader) have the rank in their names. A generator that is itself a
    value of the state is saved for each rank too: ranks draw different numbers.

    Args:
        flat: receives the entry and the arrays.
        name: the name of the value in the state.
        value: an object with `state_dict`, or a structure of tensors, arrays and plain values.
        rank: number of this rank.

    Raises:
        UnsavableState: the value cannot be saved.
    """
    stateful = hasattr(value, "state_dict")
    per_rank = bool(values.attribute(value, "per_rank") or generators.kind_of(value))
    tree = value
    if stateful:
        tree = _state_dict(value)
    path: values.Path = (name,)
    if per_rank:
        path = (f"rank{rank}", name)
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def encode(path: values.Path, value: Any) -> values.Node | None:
        if isinstance(value, Tensor):
            local = _local_part(path, value.detach())
            memory = local.untyped_storage().data_ptr(), local.storage_offset(), local.shape
            key = *memory, local.stride(), local.dtype, local.device
            # `load_state_dict` copies from tensors, so tensors with the same memory are saved once.
            if not (stateful and local.numel() and key in known):
                known[key] = _add_tensor(flat, path, value, local)
            return {"array": known[key] | _class_of(value)}
        is_array = type(value) is np.ndarray or isinstance(value, np.generic)
        # Other dtypes have no name for a file: of objects, with fields, of other packages.
        if is_array and not value.dtype.hasobject and np.dtype(value.dtype.str) == value.dtype:
            return {"array": _add_numpy(flat, path, value)}
        # An object would get the state of its generator back, in place of the generator.
        generator = None if stateful else generators.saved(value)
        node = node_of(value)
        if generator is not None:
            node = {"generator": generator.kind, "state": values.dumps(generator.state, path)}
        if node is None:
            return None
        return {"torch": node}

    node = values.encode(tree, path, encode)
    flat.entries[name] = {"tree": node, "stateful": stateful, "per_rank": per_rank}


def _state_dict(value: Any) -> Any:
    """The `state_dict` of an object; of an optimizer without moments of untrained parameters.

    A program may take parameters out of a group and leave their moments in `state`. torch raises
    KeyError then.
    """
    if not isinstance(value, Optimizer) or not hasattr(value, "state"):
        return value.state_dict()
    trained: set[int] = set()
    for group in value.param_groups:
        trained.update(map(id, group["params"]))
    state = value.state
    left = [p for p in state if isinstance(p, Tensor) and id(p) not in trained]
    untrained = {p: state.pop(p) for p in left}
    try:
        return value.state_dict()
    finally:
        state.update(untrained)


def _local_part(path: values.Path, value: Tensor) -> Tensor:
    """The plain dense tensor with the values of a tensor in this process."""
    local = value
    if hasattr(value, "_spec"):
        local = value.to_local()  # type: ignore[attr-defined]
    if is_traceable_wrapper_subclass(local):
        raise UnsavableState(
            f"{values.path_text(path)} is a {type(local).__name__}, which holds its values in "
            "other tensors: use an optimizer with ordinary tensors for its moments"
        )
    if local.layout is not torch.strided or local.is_quantized or local.is_meta:
        raise UnsavableState(
            f"{values.path_text(path)} is a tensor of layout {local.layout} on {local.device}: "
            "only dense tensors with data can be saved; convert it first (to_dense())"
        )
    return local.as_subclass(Tensor).resolve_conj().resolve_neg()


def _add_tensor(flat: FlatState, path: values.Path, value: Tensor, local: Tensor) -> dict[str, Any]:
    """Adds a tensor, or the local part of a DTensor, as a leaf. Returns its node."""
    dtype = dtype_name(value)
    layout = Layout(torch.empty_like(local, device="meta"), getattr(value, "_spec", None))
    name = flat.add(path, dtype, {"": local}, layout)
    node = {"name": name, "kind": "tensor", "dtype": dtype, "shape": list(value.shape)}
    if layout.spec is None and not layout.dense.is_contiguous():  # products round differently
        strides = np.array(layout.dense.stride())
        node["order"] = np.argsort(-strides).tolist()
    return node


def _add_numpy(flat: FlatState, path: values.Path, value: Any) -> dict[str, Any]:
    """Adds a NumPy array or scalar as bytes, because NumPy has dtypes that torch lacks."""
    # Copies read-only arrays, because torch warns about memory that it cannot write.
    raw = torch.from_numpy(np.require(value, requirements=["C", "W"]).reshape(-1).view(np.uint8))
    name = flat.add(path, value.dtype.name, {"": raw}, Layout(torch.empty_like(raw, device="meta")))
    kind = "numpy"
    if isinstance(value, np.generic):
        kind = "scalar"
    return {"name": name, "kind": kind, "dtype": value.dtype.str, "shape": list(value.shape)}


def _class_of(tensor: Tensor) -> dict[str, Any]:
    """The items of a tensor's node for its class; empty for a plain tensor and a DTensor."""
    if type(tensor) is nn.Parameter:
        return {"parameter": tensor.requires_grad}
    if type(tensor) is Tensor or hasattr(tensor, "to_local"):
        return {}
    return {"class": values.class_name(type(tensor))}


def decoded(node: Mapping[str, Any], tensor: Tensor) -> Any:
    """The value of an array node: the tensor with its class, a NumPy array or a NumPy scalar.

    Args:
        node: the node of an array, as `add_entry` has made it.
        tensor: what was read, of the dtype and shape in the node; the bytes, uint8 (n,), for NumPy.

    Returns:
        The value, with the strides that it had. Sums over other strides round differently.
    """
    if node["kind"] == "tensor":
        order = node.get("order")
        if order:
            tensor = tensor.permute(order).contiguous().permute(np.argsort(order).tolist())
        if "parameter" in node:
            return nn.Parameter(tensor, requires_grad=bool(node["parameter"]))
        if "class" in node:
            return tensor.as_subclass(values.newest_class(Tensor, node["class"]))
        return tensor
    array = tensor.numpy().view(np.dtype(node["dtype"])).reshape(node["shape"])
    if node["kind"] == "scalar":
        return array[()]
    return array


def apply(live: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Loads every restored value into the live object of the same name.

        live = {"model": model, "optimizer": optimizer}
        apply(live, store.restore(step, live).state)

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
        if isinstance(live[name], Optimizer):
            _load_optimizer(live[name], state)
        elif hasattr(live[name], "load_state_dict"):
            live[name].load_state_dict(state)
        else:
            _overwritten(live[name], state)


def _mismatches(name: str, live: Any, state: Any) -> list[str]:
    """Why a restored value does not fit the live object of its name; empty if it fits."""
    wrong: list[str] = []
    pairs = [(name, live, state)]
    least = 0
    if isinstance(live, nn.Module):
        own = live.state_dict()
        wrong = [f"{name}.{key} is not in both states" for key in own.keys() ^ state.keys()]
        pairs = [(f"{name}.{key}", own[key], state[key]) for key in own.keys() & state.keys()]
        least = 1  # layers fill empty buffers and numbers, and load any shape (observers of QAT)
    elif hasattr(live, "load_state_dict"):
        return []  # a restore has compared its identity
    elif not _can_be_overwritten(live, state):
        wrong.append(f'"{name}" is a {type(live).__name__}, which cannot be changed in place')
    for place, old, new in pairs:
        if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or old.shape == new.shape:
            continue
        if min(old.numel(), new.numel()) > least:
            wrong.append(f"{place} has the shape {tuple(new.shape)}, not {tuple(old.shape)}")
    return sorted(wrong)


def _can_be_overwritten(live: Any, state: Any) -> bool:
    """Whether a live value is changed in place: a tensor, dictionary, list or generator."""
    if isinstance(state, generators.GeneratorState):
        return generators.kind_of(live) == state.kind
    kinds = (Tensor, dict, list)
    return any(isinstance(live, kind) and isinstance(state, kind) for kind in kinds)


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a state into the optimizer's own tensors and groups; `load_state_dict` replaces them.

    The device may have no memory for second moments, CUDA graphs use the addresses, capturable
    optimizers reject a rate on the host, and other objects (SAM, a schedule) hold the groups.
    """
    groups = [*optimizer.param_groups]
    own = {"state": {**_state_dict(optimizer).get("state", {})}}
    moments = _overwritten(own, {key: state[key] for key in state.keys() & own})
    optimizer.load_state_dict({**state, **moments})
    optimizer.param_groups[:] = map(_overwritten, groups, optimizer.param_groups)


@torch.no_grad()
def _overwritten(old: Any, new: Any) -> Any:
    """The value `new`, in the tensors, containers and generators of `old` where both have them."""
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        return old.copy_(new)
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if not old.flags.writeable or (old.shape, old.dtype) != (new.shape, new.dtype):
            return new
        old[...] = new
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        items = {key: _overwritten(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, list) and isinstance(new, list):
        padded = [*old, *[None] * len(new)]
        old[:] = [_overwritten(*pair) for pair in zip(padded, new, strict=False)]
        return old
    if isinstance(new, generators.GeneratorState) and new.load_into(old):
        return old
    return new


DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}
"""Name in files, such as "float32", -> dtype."""


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype in files, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def node_of(value: Any) -> dict[str, Any] | None:
    """Encodes a dtype, device, size or dense tensor. Ignores the device of a tensor.

    Args:
        value: any value.

    Returns:
        A JSON object that `value_of` decodes, or None for other values.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
        return None
    plain = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    data = values.base64_text(plain.contiguous().view(torch.uint8).numpy())
    return {"dtype": dtype_name(value), "shape": list(value.shape), "bytes": data}


def value_of(content: dict[str, Any]) -> Any:
    """Decodes a value of `node_of`, on the CPU, or the state of a random generator.

    Args:
        content: a JSON object of `node_of` or `add_entry`. Names in it are looked up in tables.

    Raises:
        Exception: any, for content that was not made there.
    """
    if "generator" in content:
        state = values.loads(content["state"], ("generator",))
        return generators.GeneratorState(content["generator"], state)
    if "device" in content:
        return torch.device(content["device"])
    if "size" in content:
        return torch.Size(content["size"])
    dtype = DTYPES[content["dtype"]]
    if "bytes" not in content:
        return dtype
    data = torch.from_numpy(values.bytes_of(content).copy())
    return data.view(dtype).reshape(content["shape"])
