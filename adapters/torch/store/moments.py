"""How an optimizer's moments are spread over the ranks before there are any.

A fresh optimizer has no moments to restore into. Where its parameters are DTensors (FSDP2, tensor
parallel) they have to be DTensors too, and the parameters say how: read as plain tensors they would
be whole on every rank, and the first step would not take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from healcore.runtime.store import structure


def spread_parameters(
    entries: Mapping[str, Mapping[str, Any]], like: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The parameters that tell how arrays of a checkpoint are to be spread.

    Args:
        entries: from `Flat.entries`, for the names of `like`.
        like: the live state.

    Returns:
        Name of an array -> DTensor of the same shape, for moments of DTensors.
    """
    found: dict[str, Tensor] = {}
    for name, live in like.items():
        if not isinstance(live, Optimizer):
            continue
        params = [p for group in live.param_groups for p in group["params"]]
        for index, node in _items(dict(_items(entries[name]["tree"])).get("state")):
            if not isinstance(index, int) or index >= len(params):
                continue
            p = params[index]
            if hasattr(p, "to_local"):
                arrays = structure.arrays_of(node)
                found |= {a["name"]: p for a in arrays if a["shape"] == list(p.shape)}
    return found


def _items(node: Any) -> list[Any]:
    """Keys, as they are coded, and nodes of a dictionary."""
    return node.get("dict", []) if isinstance(node, dict) else []
