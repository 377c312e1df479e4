"""Fits a saved state to a live state whose parameters have changed since the save."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.live_state import is_scheduler, unwrapped

_SHOWN = 4
"""Max parameters of a group in a message."""


def missing_groups(name: str, saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """The groups that a live optimizer lacks at its end, and what to write before the Healer."""
    was, now = _groups(saved), _groups(live)
    if len(was) <= len(now) or was[: len(now)] != now:
        return []
    added = [f'{name}.add_param_group({{"params": {_text([g])}}})' for g in was[len(now) :]]
    return [
        f"{name} has the groups {_text(was)} in the saved and {_text(now)} in the live state",
        f"before the Healer write {', '.join(added)}",
    ]


def fitted(name: str, saved: Any, live: Any, identities: tuple[Any, Any], kept: list[str]) -> Any:
    """See `Copier.fitted`."""
    if isinstance(live, Optimizer) and identities[0] is not None:
        return _fitted_optimizer(name, saved, unwrapped(live), identities, kept)
    if is_scheduler(live):  # a list has one value for each group
        own = live.state_dict().items()
        return {**saved, **{k: v for k, v in own if _length(v) != _length(saved.get(k))}}
    if isinstance(live, nn.Module):
        own = live.state_dict()
        found = _fitted(name, saved, own, kept)
        for key in found.keys() - own.keys():
            del found[key]
        return found
    return saved if hasattr(live, "load_state_dict") else _fitted(name, saved, live, kept)


def _fitted(name: str, saved: Any, live: Any, kept: list[str]) -> Any:
    """`saved`, with the tensors of `live` that have another shape or that `saved` lacks."""
    if isinstance(live, Tensor) and getattr(saved, "shape", None) != live.shape:
        kept.append(name)
        return live
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        found = copy.copy(saved)  # keeps the type, and the versions of modules
        for key, part in live.items():
            if key in saved or isinstance(part, Tensor):
                found[key] = _fitted(f"{name}.{key}", saved.get(key), part, kept)  # type: ignore[index]
        return found
    return saved


def _fitted_optimizer(
    name: str, saved: Any, live: Optimizer, identities: tuple[Any, Any], kept: list[str]
) -> Any:
    """The saved state of the parameters that have the same name, and the live state of others."""
    was, now = (_groups(each or {}) for each in identities)
    place = {key: number for number, key in enumerate(chain(*was))}
    params = dict(zip(chain(*now), gradients.parameters(live), strict=True))
    moments = {key: saved["state"].get(place.get(key), {}) for key in params}
    unfit = [k for k, p in params.items() if k not in place or not _fit(moments[k], p, live)]
    if was == now and not unfit:
        return saved
    kept += [f"{name}[{key}]" for key in unfit]
    own = live.state_dict()
    state = {n: own["state"].get(n) if k in unfit else moments[k] for n, k in enumerate(params)}
    groups: list[Any] = []
    group: Any
    for group, names in zip_longest(own["param_groups"], now, fillvalue=[]):
        old = next((g for g, each in enumerate(was) if {*each} & {*names}), None)
        mine = {key: group[key] for key in ("params", "param_names") if key in group}
        groups.append(group if old is None else {**saved["param_groups"][old], **mine})
    return {
        **saved,
        "state": {n: each for n, each in state.items() if each},
        "param_groups": groups,
    }


def _fit(moments: Mapping[str, Any], param: Tensor, live: Optimizer) -> bool:
    """Whether saved moments have the shapes of the live moments, or of their parameter."""
    tensors = {k: v for k, v in moments.items() if isinstance(v, Tensor) and v.ndim}
    own = live.state.get(param, {})
    return all(getattr(own.get(k), "shape", param.shape) == v.shape for k, v in tensors.items())


def _groups(identity: Mapping[str, str]) -> list[list[str]]:
    """Names of the parameters of each group, see `live_state.identities`."""
    groups: dict[int, dict[int, str]] = {}
    for key, place in identity.items():
        if found := re.fullmatch(r"parameter (\d+) of group (\d+)", place):
            path = key.partition("[")[2].removesuffix("]")
            groups.setdefault(int(found[2]), {})[int(found[1])] = path
    places = range(max(groups, default=-1) + 1)
    return [[path for _, path in sorted(groups.get(g, {}).items())] for g in places]


def _text(groups: list[list[str]]) -> str:
    """Groups as `[a.weight, a.bias], [b.weight, ...]`."""
    shown = [
        ", ".join(g[:_SHOWN]) + (f", ... {len(g)} in all" if g[_SHOWN:] else "") for g in groups
    ]
    return ", ".join(f"[{each}]" for each in shown)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None
