"""Loads what a checkpoint has in common with a state whose structure has changed since."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.runtime.store.checkpoints import CommonState, StateMismatch
from healcore.torch import gradients
from healcore.torch.live_state import identities, optimizers
from healcore.torch.moments import reset_moments

TensorPair: TypeAlias = tuple[Tensor, Tensor]
"""A live tensor, and the saved tensor of the same name and shape."""

_PLACE = re.compile(r"parameter (\d+) of group (\d+)")
"""See `live_state.identities`."""


def load_common(live: Mapping[str, Any], saved: CommonState) -> None:
    """Loads the parameters, buffers and moments that a checkpoint and a live state both have.

    A program may add a layer, or replace its head, and continue the run. Parameters of the same
    name and shape then receive the saved values, with their moments. Other parameters keep their
    values, and begin with fresh moments. Checks everything before the first change.

    Args:
        live: name -> live object, as in `Healer(state=)`.
        saved: the state of the checkpoint, and the identities of its optimizers.

    Raises:
        StateMismatch: no parameter is in both, a parameter is sharded, or a parameter that the
            checkpoint lacks is not finite. Nothing was changed.
    """
    trained: dict[int, Tensor] = {}
    for optimizer in optimizers(live).values():
        for p in gradients.parameters(optimizer):
            trained[id(p)] = p
    if any(hasattr(p, "to_local") for p in trained.values()):
        raise StateMismatch(None, ["a parameter is sharded, and its structure has changed"])
    pairs: list[TensorPair] = []
    for name, value in live.items():
        if name in saved.state and not isinstance(value, Optimizer):
            pairs += _pairs(value, saved.state[name])
    restored = {id(old) for old, _ in pairs}
    kept = [p for key, p in trained.items() if key not in restored]
    if len(kept) == len(trained):
        raise StateMismatch(None, ["no parameter has the same name and shape in both states"])
    infinite = 0
    for p in kept:
        if not p.isfinite().all():
            infinite += 1
    if infinite:
        raise StateMismatch(
            None, [f"{infinite} of the parameters that the checkpoint lacks are not finite now"]
        )
    with torch.no_grad():
        for old, new in pairs:
            old.copy_(new)
    for name, optimizer in optimizers(live).items():
        places = dict(_moments(name, live, saved))
        reset_moments(optimizer)
        for p in gradients.parameters(optimizer):
            if id(p) in restored and id(p) in places:
                optimizer.state[p] = _copied_moments(places[id(p)], p.device)


def _copied_moments(moments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of the moments, with the devices and dtypes that `load_state_dict` would choose."""
    copied = {}
    for key, value in moments.items():
        if _is_large(value):
            copied[key] = value.to(device).clone()
        else:
            copied[key] = value
    return copied


def _pairs(live: Any, saved: Any) -> Iterator[TensorPair]:
    """Live and saved tensors of the same name and shape; parameters as the live objects."""
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        if live.shape == saved.shape:
            yield live, saved
    elif isinstance(live, nn.Module):
        own: dict[str, Tensor] = dict(live.named_parameters(remove_duplicate=False))
        own |= dict(live.named_buffers(remove_duplicate=False))
        for path, tensor in own.items():
            if path in saved:
                yield from _pairs(tensor, saved[path])
    elif isinstance(live, dict) and isinstance(saved, dict):
        for key in live:
            if key in saved:
                yield from _pairs(live[key], saved[key])
    elif isinstance(live, list) and isinstance(saved, list):
        for pair in zip(live, saved, strict=False):
            yield from _pairs(*pair)


def _moments(
    name: str, live: Mapping[str, Any], saved: CommonState
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Id of a live parameter, and the saved moments of the parameter with its name.

    The saved moments have the parameter's number, and the identity of the optimizer has its name.
    """
    state = saved.state.get(name)
    identity = saved.identities.get(name)
    if not isinstance(state, Mapping) or not identity:
        return
    names = [each for each in identities(live)[name] if each != name]
    params = gradients.parameters(optimizers(live)[name])
    for path, p in zip(names, params, strict=True):
        place = _PLACE.fullmatch(identity.get(path, ""))
        if place is None or "param_groups[" in path:  # the number of a parameter is no name
            continue
        number = state["param_groups"][int(place[2])]["params"][int(place[1])]
        moments = state["state"].get(number)
        if moments:
            yield id(p), moments


def _is_large(value: Any) -> bool:
    """Whether a value is a moment. A step counter is a 0-d tensor that stays where it is."""
    return isinstance(value, Tensor) and value.ndim > 0
