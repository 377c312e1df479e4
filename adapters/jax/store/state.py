"""A JAX state as JSON structure and named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import structure
from healcore.runtime.store.errors import UnsavableState
from healcore.runtime.store.structure import Flat


def flatten(state: Mapping[str, Any], *, shapes: bool = False) -> Flat:
    """Takes the arrays out of a state, without copies; with `shapes` ShapeDtypeStructs too."""
    flattening = _Flattening(shapes)
    entries = {
        name: flattening.entry(name, value)
        for name, value in structure.checked_names(state).items()
    }
    return Flat(entries, flattening.leaves, flattening.treedefs)


class _Flattening:
    """Collects the arrays while trees are encoded."""

    def __init__(self, shapes: bool) -> None:
        self.leaves: dict[str, Any] = {}
        self.treedefs: dict[str, Any] = {}
        self._names = structure.Names()
        self._arrays = (jax.Array, jax.ShapeDtypeStruct) if shapes else (jax.Array,)

    def entry(self, name: str, value: Any) -> dict[str, Any]:
        if hasattr(value, "state_dict"):
            node = structure.encode(value.state_dict(), (name,), self._special)
            if not getattr(value, "per_rank", False):
                return {"tree": node}
            if any(structure.arrays_of(node)):
                raise UnsavableState(
                    f'state["{name}"] is saved by each process for itself, and has an array in it: '
                    "Orbax writes such arrays from one process only; make it a list of numbers"
                )
            return {"tree": node, "per_rank": True}
        paths, self.treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
        leaves = []
        for path, leaf in paths:
            place = (name, *_parts(path))
            node = structure.encode(leaf, place, self._special)
            leaves.append([jax.tree_util.keystr(path), node])
        return {"leaves": leaves}

    def _special(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
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
        elif (
            type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic)
        ) and not value.dtype.hasobject:
            kind = "scalar" if isinstance(value, np.generic) else "numpy"
            if value.dtype.names is not None or value.dtype.kind in "SUMm":
                return None
            value = np.asarray(value, value.dtype.newbyteorder("="))
        else:
            return None
        name = self._names.at(path)
        self.leaves[name] = value
        # Orbax saves no arrays without elements; shape and dtype are all there is to them.
        shape, dtype = list(value.shape), np.dtype(value.dtype).name
        return {"array": {"name": name, "kind": kind, "dtype": dtype, "shape": shape, **extra}}


def _parts(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The readable part of each step into a pytree."""
    return tuple(
        next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)
        for key in path
    )
