"""`JaxWeights`: the weights of a state: copies, losses with earlier ones, averages among them.

An EMA, a target network and a teacher have the structure of the parameters, and an optimizer state
does not name the part that it trains. The movement of the parts shows it: an average moves towards
the parameters, which move ahead of it, and a frozen copy does not move.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.jax.driver.live_state import LiveState
from healcore.jax.heal_state import is_optax_state, nodes
from healcore.jax.opt_state import without_heal_state
from healcore.jax.transform import ProtectState
from healcore.runtime.data.positions import DataError
from healcore.runtime.driver import DIGESTED, WeightsChanged

Part = tuple[str, ...]
"""Paths of the tensors of a part of the state."""
_CLEAR = 1e-3
"""Smallest difference of two shares by which an average differs from the parameters."""


transferring = jax.transfer_guard("allow")
"""Decorator of methods that transfer arrays also where the program's transfer guard forbids it."""


class JaxWeights:
    """The weights of a state by path: the arrays that one comparison replaces together.

    These are the parameters that the optimizers train, and the batch statistics that belong to
    them, which a layer in evaluation mode reads: damage in them would be on both sides. Everything
    else stays as it is now, see `healcore.torch.driver.weights.TorchWeights`.

    Args:
        live: the state.
        candidates: the parts that may be the parameters of each engine. If they are unknown for an
            engine, all floating arrays count as parameters.
    """

    def __init__(self, live: LiveState, candidates: Sequence[Sequence[Part]]) -> None:
        self._live = live
        known = candidates if all(candidates) else []
        self._paths = {path for parts in known for part in parts for path in part}
        self._averages = frozenset[str]()
        """Paths that are known not to be trained."""
        self._mixed = mixed_groups(known, self.arrays())
        """Equal parts of which not all are trained, until their movement has shown which."""
        self._owners = _owners(live, self._paths)
        """Path of each array of batch statistics -> paths of the parameters to which it belongs."""

    def copy(self) -> dict[str, Any]:
        """Path -> copy of each array of the weights, in host memory."""
        return {path: _copy(leaf) for path, leaf in self._weights().items()}

    def digest(self) -> str:
        """See `Driver.settings`. One sync per parameter."""
        found = hashlib.blake2b(digest_size=8)
        for leaf in self.arrays().values():
            part = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
            flat = np.asarray(jax.device_get(part)).reshape(-1)
            found.update(flat[:: max(1, flat.size // DIGESTED)][:DIGESTED].tobytes())
        return found.hexdigest()

    def nonfinite(self) -> list[str]:
        """Paths of the parameters with a NaN or Inf, averages included."""
        found = {path: jnp.isfinite(leaf).all() for path, leaf in self.arrays().items()}
        return [path for path, finite in jax.device_get(found).items() if not finite]

    @transferring
    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[str, Any] | None = None,
        *,
        redraw: bool = False,
    ) -> list[Any]:
        """Calls `loss_fn(state, batch)` for each batch, or `loss_fn(batch)` for nnx objects.

        Replaces the current weights by `weights`, but keeps the random keys of the state.
        """
        weights = weights or {}
        shapes = {path: getattr(leaf, "shape", None) for path, leaf in weights.items()}
        if weights and any(shapes.get(k) != leaf.shape for k, leaf in self._weights().items()):
            raise WeightsChanged
        leaves = jax.tree.leaves(batches)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise DataError("the step has donated the batch: remove it from donate_argnums")
        live, in_place = self._live.read(), self._live.in_place
        replaced = self._without_averages(weights)
        if redraw:
            leaves = tree_leaves_with_path(live)
            replaced |= {keystr(path): _other_key(leaf) for path, leaf in leaves}
        state = _with(live, replaced)
        try:
            if in_place and replaced:
                self._live.write(state)
            arguments = () if in_place else (self._live.whole(state),)
            return [jax.device_get(loss_fn(*arguments, batch)) for batch in batches]
        finally:
            if in_place:
                self._live.write(live)

    def arrays(self, tree: Any = None) -> dict[str, Any]:
        """Path -> parameter (or floating array, if unknown), in the same order in all processes.

        The healing states do not count: they contain norms of gradients that were not applied.
        """
        tree = without_heal_state(self._live.read() if tree is None else tree)
        leaves = {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}
        if self._paths:
            return {path: leaf for path, leaf in leaves.items() if path in self._paths}
        kinds = {path: getattr(leaf, "dtype", np.dtype(object)) for path, leaf in leaves.items()}
        return {k: leaf for k, leaf in leaves.items() if jnp.issubdtype(kinds[k], jnp.floating)}

    def _weights(self) -> dict[str, Any]:
        """Path -> parameter that may be trained, or array of batch statistics."""
        found = self.arrays()
        if self._owners:
            leaves = tree_leaves_with_path(self._live.read())
            found |= {name: x for path, x in leaves if (name := keystr(path)) in self._owners}
        return {path: leaf for path, leaf in found.items() if not self._is_average(path)}

    def _is_average(self, path: str) -> bool:
        """Whether an array is not trained, or batch statistics of parameters that are not."""
        return self._owners.get(path, frozenset({path})) <= self._averages

    def _without_averages(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The trained part of a copy. Empty while it is unknown: the current weights stay."""
        if weights and self._mixed:
            before = self.arrays(_with(self._live.read(), weights))
            found = untrained(self._mixed, before, self.arrays())
            if found is None:
                return {}
            self._averages = found
            self._mixed = []
        return {path: leaf for path, leaf in weights.items() if not self._is_average(path)}


def _owners(live: LiveState, parameters: Collection[str]) -> dict[str, frozenset[str]]:
    """Path of each floating array of batch statistics -> paths of the parameters it belongs to.

    These are the parameters in the nearest enclosing part of the state that has any. Empty if the
    parameters are unknown: then the batch statistics count as parameters.
    """
    tree = live.read()
    leaves: dict[Any, Any] = dict(tree_leaves_with_path(tree))
    within: dict[Any, set[str]] = {}
    for path in leaves:
        if (name := keystr(path)) in parameters:
            for depth in range(len(path) + 1):
                within.setdefault(path[:depth], set()).add(name)
    optimizers = {path for path, _ in nodes(_is_of_optimizer, tree)}
    found = {}
    for path in live.batch_statistics():
        parts = [path[:depth] for depth in reversed(range(len(path)))]
        dtype = getattr(leaves[path], "dtype", np.dtype(object))
        if path in within or not optimizers.isdisjoint(parts):
            continue
        if jnp.issubdtype(dtype, jnp.floating):
            owners = next((within[part] for part in parts if part in within), None)
            found |= {} if owners is None else {keystr(path): frozenset(owners)}
    return found


def _is_of_optimizer(node: Any) -> bool:
    return is_optax_state(node) or isinstance(node, ProtectState)


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


class PartGroup(NamedTuple):
    """Parts with tensors of the same shapes, and how many of these parts are trained."""

    parts: Sequence[Part]
    trained: int


def mixed_groups(fitting: Iterable[Iterable[Part]], tensors: Mapping[str, Any]) -> list[PartGroup]:
    """The groups of which not all parts are trained. `fitting` are the parts for each optimizer."""
    groups: dict[Any, Counter[Part]] = {}
    for part in (part for parts in fitting for part in parts):
        shapes = tuple(jnp.shape(tensors[name]) for name in part)
        groups.setdefault(shapes, Counter())[part] += 1
    found = [PartGroup(list(parts), max(parts.values())) for parts in groups.values()]
    return [each for each in found if len(each.parts) > each.trained]


def untrained(
    among: Sequence[PartGroup], before: Mapping[str, Any], now: Mapping[str, Any]
) -> frozenset[str] | None:
    """Paths of the tensors that are not trained, or None if the movement does not show them.

    Args:
        among: result of `mixed_groups`.
        before: path -> earlier tensor.
        now: path -> current tensor, several steps later.
    """
    found: list[str] = []
    for parts, trained in among:
        shares = {part: _share_towards_others(part, parts, before, now) for part in parts}
        last, first = sorted(shares.values())[trained - 1 : trained + 1]
        if not first - last > _CLEAR:  # also if NaN
            return None
        found += [name for part in parts if shares[part] >= first for name in part]
    return frozenset(found)


def _share_towards_others(
    part: Part, parts: Sequence[Part], before: Mapping[str, Any], now: Mapping[str, Any]
) -> float:
    """Largest share of a part's movement that has brought it nearer to another, or Inf at rest."""

    def distance(tensors: Mapping[str, Any], other: Part) -> jax.Array:
        pairs = zip(part, other, strict=True)
        gaps = [jnp.asarray(tensors[a], jnp.float32) - now[b] for a, b in pairs]
        return jnp.sqrt(sum(jnp.square(gap).sum() for gap in gaps))

    others = [each for each in parts if each != part]
    nearer = jnp.stack([distance(before, each) - distance(now, each) for each in others]).max()
    moved, nearer = map(float, jax.device_get((distance(before, part), nearer)))
    return nearer / moved if moved else math.inf
