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
from healcore.runtime.store.errors import StateMismatch, StoreError, pickled
from healcore.torch.plain_values import value_of
from healcore.torch.store.flattening import HOW, Flat, class_name, flatten


def assemble(
    entries: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, Tensor],
    like: Mapping[str, Any],
    devices: Callable[[str], torch.device | None] | None = None,
    *,
    trust: bool = False,
) -> dict[str, Any]:
    """The state of some names.

    Args:
        entries: from `Flat.entries`, for (at least) the names of `like`.
        arrays: name of array -> tensor, which becomes part of the result.
        like: name -> live value; named tuples get their type from it.
        devices: where the tensors of plain trees belong; None leaves them where they are.
        trust: read what was pickled.

    Raises:
        Untrusted: something was pickled.
    """
    state = {}
    for name, live in like.items():
        entry = entries[name]
        move = None if entry["stateful"] or hasattr(live, "state_dict") else devices

        def fetch(tag: str, content: Any, move: Any = move, name: str = name) -> Any:
            if tag == "pickle":
                return _unpickled(name, content, trust)
            if tag == "torch":
                return value_of(content)
            if tag == "subclass":
                return _subclass(name, content, fetch, trust)
            return _array(content, arrays[content["name"]], move)

        tree = None if hasattr(live, "state_dict") else live
        state[name] = structure.decode(entry["tree"], fetch, tree)
    return state


def _unpickled(name: str, content: str, trust: bool) -> Any:
    if not trust:
        raise pickled(f"something in {structure.place((name,))}", HOW)
    return pickle.loads(base64.b64decode(content))


def _subclass(name: str, content: Mapping[str, Any], fetch: Callable[..., Any], trust: bool) -> Any:
    """A tensor made of others. Its class is one that this program has, whatever the name says."""
    if "made" in content:  # by healcore until it wrote plain values
        kind, context = _unpickled(name, content["made"], trust)
    else:
        context = structure.decode(content["context"], fetch)
        kind = _tensor_classes().get(content["class"])
    if kind is None:
        raise StoreError(
            f"{structure.place((name,))} holds a {content['class']:.200}, which is no class of "
            "tensors in this program: import the package that it is of, then restore"
        )
    parts = {part: structure.decode(node, fetch) for part, node in content["parts"]}
    shape, stride = torch.Size(content["shape"]), tuple(content["stride"])
    return kind.__tensor_unflatten__(parts, context, shape, stride)


def _tensor_classes() -> dict[str, Any]:
    """Every class of tensors made of others that has been defined by now."""
    found, seen = {}, [Tensor]
    for kind in seen:
        seen += kind.__subclasses__()
        if hasattr(kind, "__tensor_unflatten__"):
            found[class_name(kind)] = kind
    return found


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
    flat = flatten(like, rank, trust=True)  # to compare: nothing of it is written
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
