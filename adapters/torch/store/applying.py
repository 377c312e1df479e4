"""Putting a restored state into the live objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from healcore.runtime.store.errors import StateMismatch


def apply(live: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Loads every restored name into the live object of that name.

    Objects get their `load_state_dict` called. Tensors, alone or in dictionaries and lists of them,
    are overwritten in place, so that everybody who holds one sees it; other values are replaced.
    What can be checked without touching anything is checked first.

    Args:
        live: what was saved from.
        restored: `Restored.state`.

    Raises:
        StateMismatch: it does not fit; nothing has been touched.
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
