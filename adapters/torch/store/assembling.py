"""From named arrays back to a torch state, checked against the live one."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.runtime.store import structure
from healcore.runtime.store.errors import StateMismatch
from healcore.torch.store.flattening import Flat, flatten


def assemble(
    entries: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, Tensor],
    like: Mapping[str, Any],
    devices: Callable[[str], torch.device | None] | None = None,
) -> dict[str, Any]:
    """The state of some names.

    Args:
        entries: from `Flat.entries`, for (at least) the names of `like`.
        arrays: name of array -> tensor, which becomes part of the result.
        like: name -> live value; named tuples get their type from it.
        devices: where the tensors of plain trees belong; None leaves them where they are.
    """
    state = {}
    for name, live in like.items():
        entry = entries[name]
        move = None if entry["stateful"] or hasattr(live, "state_dict") else devices

        def fetch(tag: str, content: Any, move: Any = move) -> Any:
            if tag == "pickle":
                return pickle.loads(base64.b64decode(content))
            if tag == "subclass":
                kind, context = pickle.loads(base64.b64decode(content["made"]))
                parts = {part: structure.decode(node, fetch) for part, node in content["parts"]}
                return kind.__tensor_unflatten__(
                    parts, context, torch.Size(content["shape"]), tuple(content["stride"])
                )
            return _array(content, arrays[content["name"]], move)

        tree = None if hasattr(live, "state_dict") else live
        state[name] = structure.decode(entry["tree"], fetch, tree)
    return state


def checked(step: int | None, saved: Mapping[str, Any], like: Mapping[str, Any], rank: int) -> Flat:
    """The live state flattened, if the saved one fits it.

    Of objects with `state_dict` only the names are checked: a fresh optimizer has no moments yet,
    and `load_state_dict` knows best what it takes. Trees must have the same arrays.

    Args:
        step: for the error.
        saved: entries of the checkpoint.
        like: the live state.
        rank: of this process.

    Raises:
        StateMismatch: it does not fit.
    """
    flat = flatten(like, rank)
    wrong = [f'there is no "{name}" in it' for name in like if name not in saved]
    for name in like:
        if name in saved and not flat.entries[name]["stateful"]:
            here = {each["name"]: each for each in structure.arrays_of(flat.entries[name]["tree"])}
            there = {each["name"]: each for each in structure.arrays_of(saved[name]["tree"])}
            wrong += _differences(there, here)
    if wrong:
        raise StateMismatch(step, wrong)
    return flat


def _differences(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    wrong = [f"{name} is not in it" for name in live if name not in saved]
    wrong += [f"{name} is in it and not in the live state" for name in saved if name not in live]
    for name in live.keys() & saved.keys():
        a, b = saved[name], live[name]
        if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
            wrong.append(f"{name} is {_shown(a)} in it and {_shown(b)} in the live state")
    return wrong


def _shown(node: Mapping[str, Any]) -> str:
    return f"{node['dtype']}{tuple(node['shape'])}"


def _array(node: Mapping[str, Any], tensor: Tensor, devices: Any) -> Any:
    if node["kind"] == "tensor":
        device = devices(node["name"]) if devices is not None else None
        return tensor if device is None else tensor.to(device)
    array = tensor.numpy().view(np.dtype(node["dtype"])).reshape(node["shape"])
    return array[()] if node["kind"] == "scalar" else array
