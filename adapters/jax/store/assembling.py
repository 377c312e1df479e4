"""From named arrays back to a JAX state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from healcore.runtime.store import structure


def assemble(
    entries: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, Any],
    treedefs: Mapping[str, Any],
) -> dict[str, Any]:
    """The state.

    Args:
        entries: from `Flat.entries`, whose leaves are in the order of the trees.
        arrays: name of array -> array, which becomes part of the result.
        treedefs: PyTreeDefs of the pytrees.
    """

    def fetch(tag: str, content: Mapping[str, Any]) -> Any:
        return _array(content, arrays[content["name"]])

    state = {}
    for name, entry in entries.items():
        if "tree" in entry:
            state[name] = structure.decode(entry["tree"], fetch)
        else:
            leaves = [structure.decode(node, fetch) for _, node in entry["leaves"]]
            state[name] = jax.tree_util.tree_unflatten(treedefs[name], leaves)
    return state


def _array(node: Mapping[str, Any], array: Any) -> Any:
    if node["kind"] == "key":
        return jax.random.wrap_key_data(array, impl=node["impl"])
    if node["kind"] == "scalar" and isinstance(array, np.ndarray):
        return array[()]
    return array
