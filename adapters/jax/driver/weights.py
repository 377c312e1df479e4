"""`JaxWeights`: the parameters of a state: copies, and losses with earlier parameters.

An EMA, a target network and a teacher have the structure of the parameters, and an optimizer state
does not name the part that it trains. Names show it, see `EngineEntry.leaves`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.jax.driver.engines import EngineEntry
from healcore.jax.driver.live_state import LiveState
from healcore.jax.heal_state import HealStateError
from healcore.jax.opt_state import without_heal_state
from healcore.runtime.driver import SAMPLE, WeightsChanged


class JaxWeights:
    """The parameters of a state by path.

    Args:
        live: the state.
        engines: the engines of the run. If the candidates of an engine are unknown, all floating
            arrays count as parameters.
    """

    def __init__(self, live: LiveState, engines: Sequence[EngineEntry]) -> None:
        self._live = live
        known = engines if all(engine.candidates for engine in engines) else []
        self._paths = {path for each in known for part in each.candidates for path in part}
        self._untrained, self._unclear = _untrained_parts(known, self._all())

    def copy(self) -> dict[str, Any]:
        """Path -> copy of each trained parameter, in host memory."""
        return {path: _copy(leaf) for path, leaf in self._trained().items()}

    def arrays(self) -> list[Any]:
        """The parameters, or all floating arrays of the state if the parameters are unknown."""
        return list(self._all().values())

    def digest(self) -> str:
        """See `Driver.settings`. One sync per parameter."""
        found = hashlib.blake2b(digest_size=8)
        for leaf in self._all().values():
            part = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
            flat = np.asarray(part).reshape(-1)
            found.update(flat[:: max(1, flat.size // SAMPLE)][:SAMPLE].tobytes())
        return found.hexdigest()

    def nonfinite(self) -> list[str]:
        """Paths of the parameters with a NaN or Inf, averages included."""
        found = {path: jnp.isfinite(leaf).all() for path, leaf in self._all().items()}
        return [path for path, finite in jax.device_get(found).items() if not finite]

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[str, Any] | None = None,
        *,
        redraw: bool = False,
    ) -> list[Any]:
        """Calls `loss_fn(state, batch)` for each batch, or `loss_fn(batch)` for nnx objects.

        Replaces the parameters by `weights`, but keeps the current random keys of the state.
        """
        if weights and self._unclear:
            raise HealStateError(
                f"state{self._unclear[0]} and state{self._unclear[1]} may both be parameters that "
                'an optimizer trains: name them, as in state={"params": params, "ema": average}'
            )
        weights = weights or {}
        shapes = {path: getattr(leaf, "shape", None) for path, leaf in weights.items()}
        if weights and any(shapes.get(k) != leaf.shape for k, leaf in self._trained().items()):
            raise WeightsChanged
        live, in_place = self._live.read(), self._live.in_place
        replaced = dict(weights)
        if redraw:
            leaves = tree_leaves_with_path(live)
            replaced |= {keystr(path): _other_key(leaf) for path, leaf in leaves}
        state = _with(live, replaced)
        try:
            if in_place and replaced:
                self._live.write(state)
            arguments = () if in_place else (state,)
            return [jax.device_get(loss_fn(*arguments, batch)) for batch in batches]
        finally:
            if in_place:
                self._live.write(live)

    def _all(self, tree: Any = None) -> dict[str, Any]:
        """Path -> parameter (or floating array, if unknown), in the same order in all processes.

        The healing states do not count: they contain norms of gradients that were not applied.
        """
        tree = without_heal_state(self._live.read() if tree is None else tree)
        leaves = {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}
        if self._paths:
            return {path: leaf for path, leaf in leaves.items() if path in self._paths}
        kinds = {path: getattr(leaf, "dtype", np.dtype(object)) for path, leaf in leaves.items()}
        return {k: leaf for k, leaf in leaves.items() if jnp.issubdtype(kinds[k], jnp.floating)}

    def _trained(self) -> dict[str, Any]:
        return {path: leaf for path, leaf in self._all().items() if path not in self._untrained}


def _untrained_parts(
    engines: Sequence[EngineEntry], tensors: Mapping[str, Any]
) -> tuple[frozenset[str], list[str]]:
    """Paths of the parts that only resemble the parameters of an engine: averages, teachers.

    Also returns the first path of each part of which the names do not show whether it is trained.
    """
    groups: dict[Any, Counter[tuple[str, ...]]] = {}
    for part in (part for engine in engines for part in engine.candidates):
        shapes = tuple(jnp.shape(tensors[path]) for path in part)
        groups.setdefault(shapes, Counter())[part] += 1
    named = {engine.leaves for engine in engines}
    found: list[str] = []
    for parts in groups.values():
        trained = max(parts.values())
        if len(parts) > trained:
            if len(named & parts.keys()) != trained:
                return frozenset(), [part[0] for part in parts]
            found += [path for part in parts if part not in named for path in part]
    return frozenset(found), []


def _copy(leaf: Any) -> Any:
    """A copy in host memory, which a donation of the state does not delete."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        return jnp.copy(leaf)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))


def _other_key(leaf: Any) -> Any:
    """Another random key, or the leaf if it is no key. Raw keys and counts of keys are uint32."""
    kind = getattr(leaf, "dtype", None)
    if kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key):
        data = _other_key(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return leaf + 1 if kind == np.uint32 else leaf


def _with(live: Any, weights: Mapping[str, Any]) -> Any:
    """Replaces leaves of a state by `weights`."""

    def one(path: Any, leaf: Any) -> Any:
        saved = weights.get(keystr(path), leaf)
        moved = isinstance(saved, jax.Array) and saved is not leaf
        return jax.device_put(saved, leaf.sharding) if moved else saved

    return tree_map_with_path(one, live)
