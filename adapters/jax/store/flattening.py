"""A JAX state as JSON structure and named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import structure
from healcore.runtime.store.errors import StateMismatch, StoreError, UnsavableState


class Flat(NamedTuple):
    """A whole state."""

    entries: dict[str, dict[str, Any]]
    """Name -> {"tree": node} of an object with `state_dict`, or {"leaves": [[path, node], …]} of a
    pytree; JSON-safe."""
    leaves: dict[str, Any]
    """Name of array -> jax.Array, np.ndarray or jax.ShapeDtypeStruct."""
    treedefs: dict[str, Any]
    """PyTreeDefs of the pytrees. Not saved: trees are restored into the structure of live ones."""


def flatten(state: Mapping[str, Any], *, shapes: bool = False) -> Flat:
    """Takes the arrays out of a state. Copies nothing.

    Args:
        state: name -> pytree, or object with `state_dict`.
        shapes: jax.ShapeDtypeStruct may stand for an array.

    Raises:
        UnsavableState: something in it cannot be saved.
    """
    if not isinstance(state, Mapping) or not state:
        raise StoreError(
            f"the state to save maps names to what is saved, and holds something; not {state!r:.60}"
        )
    flattening = _Flattening(shapes)
    entries, treedefs = {}, {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise StoreError(f"names in the state are strings, not {name!r}")
        if hasattr(value, "state_dict"):
            entries[name] = {"tree": flattening.encode((name,), value.state_dict())}
            continue
        paths, treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
        entries[name] = {
            "leaves": [
                [jax.tree_util.keystr(path), flattening.encode((name, *_parts(path)), leaf)]
                for path, leaf in paths
            ]
        }
    return Flat(entries, flattening.leaves, treedefs)


def arrays_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The array nodes of one name."""
    nodes = [entry["tree"]] if "tree" in entry else [node for _, node in entry["leaves"]]
    return [each for node in nodes for each in structure.arrays_of(node)]


def checked(step: int | None, saved: Mapping[str, Any], like: Mapping[str, Any]) -> Flat:
    """The live state flattened, if the saved one fits it.

    Pytrees must have the same leaves; an object with `state_dict` knows best what it takes.

    Args:
        step: for the error.
        saved: entries of the checkpoint.
        like: the live state; leaves may be jax.ShapeDtypeStruct.

    Raises:
        StateMismatch: it does not fit.
    """
    flat = flatten(like, shapes=True)
    wrong = [f'there is no "{name}" in it' for name in like if name not in saved]
    for name, live in flat.entries.items():
        if name in saved and "leaves" in live:
            if "leaves" not in saved[name]:
                wrong.append(f'"{name}" was an object with state_dict')
            else:
                wrong += _differences(name, dict(saved[name]["leaves"]), dict(live["leaves"]))
    if wrong:
        raise StateMismatch(step, wrong)
    return flat


class _Flattening:
    """Collects the arrays while trees are encoded."""

    def __init__(self, shapes: bool) -> None:
        self.leaves: dict[str, Any] = {}
        self._arrays = (jax.Array, jax.ShapeDtypeStruct) if shapes else (jax.Array,)
        self._names = structure.Names()

    def encode(self, path: tuple[Any, ...], value: Any) -> structure.Node:
        """The node of a leaf, or of a whole state dictionary."""
        return structure.encode(value, path, self._special)

    def _special(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
        """The node of what JSON does not have."""
        extra = {}
        if isinstance(value, self._arrays):
            kind = "jax"
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                kind = "key"
                extra = {"impl": _impl(value)}
                if isinstance(value, jax.ShapeDtypeStruct):
                    raise UnsavableState(
                        f"{structure.place(path)} is the shape of a random key: pass a key"
                    )
                value = jax.random.key_data(value)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
            if value.dtype.names is not None or value.dtype.kind in "SUMm":
                return None
            value = np.asarray(value, value.dtype.newbyteorder("="))
        else:
            return None
        name = self._names.at(path)
        # Orbax saves no arrays without elements; shape and dtype are all there is to them.
        self.leaves[name] = value
        shape, dtype = list(value.shape), np.dtype(value.dtype).name
        return {"array": {"name": name, "kind": kind, "dtype": dtype, "shape": shape, **extra}}


def _impl(key: Any) -> str:
    return str(jax.random.key_impl(key))


def _parts(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The readable part of each step into a pytree."""
    return tuple(
        next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)
        for key in path
    )


def _differences(
    name: str, saved: Mapping[str, structure.Node], live: Mapping[str, structure.Node]
) -> list[str]:
    wrong = [f"{name}{path} is not in it" for path in live if path not in saved]
    wrong += [f"{name}{path} is in it, not in the live state" for path in saved if path not in live]
    for path in live.keys() & saved.keys():
        a, b = _shown(saved[path]), _shown(live[path])
        if a != b:
            wrong.append(f"{name}{path} is {a} in it and {b} in the live state")
    return sorted(wrong)


def _shown(node: structure.Node) -> str:
    """What has to be the same. JAX and NumPy arrays may stand for each other, keys not."""
    array = node.get("array") if isinstance(node, dict) else None
    if array is None:
        return "no array"
    kind = f" {array['impl']} key" if array["kind"] == "key" else ""
    return f"{array['dtype']}{tuple(array['shape'])}{kind}"
