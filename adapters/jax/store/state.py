"""A JAX state as JSON structure and named arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import structure
from healcore.runtime.store.errors import UnsavableState
from healcore.runtime.store.structure import Flat, Flattening


def flatten(state: Mapping[str, Any], *, shapes: bool = False) -> Flat:
    """Takes the arrays out of a state. Copies nothing.

    Args:
        state: name -> pytree, or object with `state_dict`.
        shapes: jax.ShapeDtypeStruct may stand for an array.

    Raises:
        UnsavableState: something in it cannot be saved.
    """
    return _Flattening(shapes).flatten(state)


def description(node: structure.Node) -> str:
    """What has to be the same at a leaf. JAX and NumPy arrays may replace each other, keys not."""
    array = node.get("array") if isinstance(node, dict) else None
    if array is None:
        return "no array"
    kind = f" {array['impl']} key" if array["kind"] == "key" else ""
    return f"{array['dtype']}{tuple(array['shape'])}{kind}"


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


class _Flattening(Flattening):
    def __init__(self, shapes: bool) -> None:
        super().__init__()
        self._arrays = (jax.Array, jax.ShapeDtypeStruct) if shapes else (jax.Array,)

    def entry(self, name: str, value: Any) -> dict[str, Any]:
        if hasattr(value, "state_dict"):
            return {"tree": structure.encode(value.state_dict(), (name,), self.special)}
        paths, self.flat.treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
        return {
            "leaves": [
                [
                    jax.tree_util.keystr(path),
                    structure.encode(leaf, (name, *_parts(path)), self.special),
                ]
                for path, leaf in paths
            ]
        }

    def special(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
        extra = {}
        if isinstance(value, self._arrays):
            kind = "jax"
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                if isinstance(value, jax.ShapeDtypeStruct):
                    raise UnsavableState(
                        f"{structure.place(path)} is the shape of a random key: pass a key"
                    )
                kind, extra = "key", {"impl": str(jax.random.key_impl(value))}
                value = jax.random.key_data(value)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
            if value.dtype.names is not None or value.dtype.kind in "SUMm":
                return None
            value = np.asarray(value, value.dtype.newbyteorder("="))
        else:
            return None
        name = self.names.at(path)
        self.flat.leaves[name] = value
        # Orbax saves no arrays without elements; shape and dtype are all there is to them.
        shape, dtype = list(value.shape), np.dtype(value.dtype).name
        return {"array": {"name": name, "kind": kind, "dtype": dtype, "shape": shape, **extra}}


def _parts(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The readable part of each step into a pytree."""
    return tuple(
        next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)
        for key in path
    )


def _array(node: Mapping[str, Any], array: Any) -> Any:
    if node["kind"] == "key":
        return jax.random.wrap_key_data(array, impl=node["impl"])
    if node["kind"] == "scalar" and isinstance(array, np.ndarray):
        return array[()]
    return array
