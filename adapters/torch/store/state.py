"""Converts a torch state and its values to JSON and named arrays, and loads a restored state.

Names from a file are looked up in tables, never with `getattr`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from healcore.runtime.data.random_states import generator_state, set_generator_state
from healcore.runtime.store import values
from healcore.runtime.store.array_format import FlatState
from healcore.runtime.store.checkpoints import StateMismatch, UnsavableState
from healcore.torch import gradients
from healcore.torch.live_state import GeneratorState, kind_of

DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}
"""Name in files, such as "float32", -> dtype."""


def add_entry(flat: FlatState, name: str, value: Any, rank: int) -> None:
    """Adds the entry of a value of the state to `flat`, and its arrays.

    The part of a leaf, at "", is a plain tensor on any device: the tensor, or the local part of a
    DTensor.

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
    per_rank = bool(values.attribute(value, "per_rank") or kind_of(value))
    tree = value
    if stateful:
        tree = _state_dict(value)
    path: values.Path = (name,)
    if per_rank:
        path = (f"rank{rank}", name)
    known: dict[tuple[Any, ...], values.Node] = {}

    def encode(path: values.Path, value: Any) -> values.Node | None:
        if isinstance(value, Tensor):
            local = _local_part(path, value.detach())
            memory = local.untyped_storage().data_ptr(), local.storage_offset(), local.shape
            key = *memory, local.stride(), local.dtype
            # `load_state_dict` copies from tensors, so tied weights are saved once. The storage has
            # their address: `Tensor.data_ptr` is 0 for tensors of a backend in Python.
            if key not in known or not (stateful and local.numel()):
                known[key] = _add_tensor(flat, path, value, local, "tensor")
            return known[key]
        is_array = type(value) is np.ndarray and value.dtype.isnative
        if is_array and value.dtype.name in DTYPES:
            # Copies read-only arrays, because torch warns about memory that it cannot write.
            tensor = torch.from_numpy(np.require(value, requirements=["C", "W"]))
            return _add_tensor(flat, path, tensor, tensor, "numpy")
        kind = kind_of(value)
        if kind and not stateful:  # an object would get the state in the place of its generator
            state = values.dumps(generator_state(value), path)
            return {"torch": {"generator": kind, "state": state}}
        if isinstance(value, torch.Size):
            return {"tuple": [*value]}
        return values.framework_node(path, value)

    node = values.encode(tree, path, encode)
    flat.entries[name] = {"tree": node, "stateful": stateful, "per_rank": per_rank}


def _state_dict(value: Any) -> Any:
    """The `state_dict` of an object; of an optimizer without moments of untrained parameters.

    A program may take parameters out of a group and leave their moments in `state`. torch raises
    KeyError then. DeepSpeed's optimizer has no `state`.
    """
    if not isinstance(value, Optimizer) or not hasattr(value, "state"):
        return value.state_dict()
    trained = set(gradients.parameters(value))
    untrained = [p for p in value.state if isinstance(p, Tensor) and p not in trained]
    left = {p: value.state.pop(p) for p in untrained}
    try:
        return value.state_dict()
    finally:
        value.state.update(left)


def _local_part(path: values.Path, value: Tensor) -> Tensor:
    """The plain tensor with the values of a tensor in this process."""
    local: Any = value
    if hasattr(value, "_spec"):
        local = local.to_local()
    has_no_data = local.layout is not torch.strided or local.is_quantized or local.is_meta
    if has_no_data or bool(is_traceable_wrapper_subclass(local)):
        raise UnsavableState(
            f"{values.path_text(path)} is a {type(value).__name__} of layout {value.layout} on "
            f"{value.device}: only dense tensors with data of their own can be saved; convert it "
            "first (to_dense()), or use an optimizer with ordinary tensors for its moments"
        )
    return local.as_subclass(Tensor).resolve_conj().resolve_neg()


def _add_tensor(
    flat: FlatState, path: values.Path, value: Tensor, local: Tensor, kind: str
) -> values.Node:
    """Adds a tensor, of which `local` is the part of this process, as a leaf."""
    spec, dtype = getattr(value, "_spec", None), str(value.dtype).removeprefix("torch.")
    node = flat.add(path, kind, dtype, value.shape, {"": local}, spec)
    if spec is None and not local.is_contiguous():
        dense = torch.empty_like(local, device="meta")  # without the gaps of a slice
        if not dense.is_contiguous():  # products round differently
            node["strides"] = list(dense.stride())
    return {"array": node}


def apply(live: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Loads every restored value into the live object of the same name.

        live = {"model": model, "optimizer": optimizer}
        apply(live, store.restore(step, live).state)

    Calls `load_state_dict` if the object has it. Overwrites tensors in place, also in dictionaries
    and lists. Replaces other values in them. The modules are compared before the first change.

    Args:
        live: name -> live object.
        restored: name -> restored value, `Restored.state`.

    Raises:
        StateMismatch: the state does not fit.
    """
    for name, state in restored.items():
        if isinstance(live[name], nn.Module):
            own = live[name].state_dict()
            _check_module(name, own, state)
            # Without the versions of its modules, torch converts a state as an early one.
            if hasattr(own, "_metadata"):
                state._metadata = own._metadata
    for name, state in restored.items():
        if isinstance(live[name], Optimizer):
            _load_optimizer(live[name], state)
        elif hasattr(live[name], "load_state_dict"):
            live[name].load_state_dict(state)
        elif _overwritten(live[name], state) is not live[name]:
            kind = type(live[name]).__name__
            raise StateMismatch(None, [f'"{name}" is a {kind}, which cannot be changed in place'])


def _check_module(name: str, live: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises StateMismatch unless a saved state fits a module."""
    wrong = [f"{name}.{key} is not in both states" for key in live.keys() ^ state.keys()]
    for key in live.keys() & state.keys():
        old, new = getattr(live[key], "shape", ()), getattr(state[key], "shape", ())
        # Layers fill empty buffers and numbers, and load any shape (observers of QAT).
        if old != new and min(math.prod(old), math.prod(new)) > 1:
            wrong.append(f"{name}.{key} has the shape {tuple(new)}, not {tuple(old)}")
    if wrong:
        raise StateMismatch(None, sorted(wrong))


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a state into the optimizer's own tensors and groups; `load_state_dict` replaces them.

    The device may have no memory for second moments, CUDA graphs use the addresses, capturable
    optimizers reject a rate on the host, and other objects (SAM, a schedule) hold the groups.
    """
    groups = [*optimizer.param_groups]
    moments = _overwritten(_state_dict(optimizer).get("state"), state.get("state", {}))
    optimizer.load_state_dict({**state, "state": moments})
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
    if isinstance(new, GeneratorState) and kind_of(old) == new.kind:
        set_generator_state(old, new.state)
        return old
    return new


def node_of(value: Any) -> dict[str, Any] | None:
    """Encodes a dtype, a device, or a tensor of the state of a data loader, without its device.

    Args:
        value: any value.

    Returns:
        A JSON object that `value_of` decodes, or None for other values.
    """
    if isinstance(value, torch.dtype | torch.device):
        return {"name": str(value).removeprefix("torch.")}
    if type(value) is not Tensor:
        return None
    try:
        array = value.detach().cpu().numpy()
    except (TypeError, RuntimeError):  # NumPy has no such dtype or layout
        return None
    return values.pack_array(array)


def value_of(content: dict[str, Any]) -> Any:
    """Decodes a value of `node_of`, on the CPU, or the state of a random generator.

    Args:
        content: a JSON object of `node_of` or `add_entry`. Names in it are looked up in tables.

    Raises:
        Exception: any, for content that was not made there.
    """
    if "generator" in content:
        state = values.loads(content["state"], ("generator",))
        return GeneratorState(content["generator"], state)
    if "bytes" in content:
        return torch.from_numpy(values.unpack_array(content))
    name = content["name"]
    return DTYPES.get(name) or torch.device(name)
