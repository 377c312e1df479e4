"""`JaxWeights`: copies the weights of a state, and evaluates the loss with earlier weights.

A comparison replaces the weights that are trained, and only these weights. An average of the
weights has the same structure, so `averages` finds out which part of the state is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.core.signals import SignalError
from healcore.jax.array_leaves import Leaf, PyTree
from healcore.jax.driver.averages import Part, mixed_groups, untrained
from healcore.jax.driver.program_state import ProgramState, is_donated
from healcore.jax.heal_state import ProtectState
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import is_optax_state
from healcore.jax.tree_nodes import Path, nodes
from healcore.runtime.driver import WeightsChanged
from healcore.runtime.program_settings import DIGESTED
from healcore.runtime.run.compare.loss_function import NotComparable

transferring = jax.transfer_guard("allow")
"""Decorator of methods that transfer arrays even if the program's transfer guard forbids it."""

_DONATING = (
    "loss_fn has donated its state, which the training needs: remove donate_argnums from loss_fn"
)


class JaxWeights:
    """Copies the weights of a state by path, and computes losses with earlier weights.

    The weights are the arrays that one comparison replaces together: the parameters that the
    optimizers train, and their batch statistics, which a layer in evaluation mode reads. With the
    current statistics, damage in them would spoil the loss of the earlier weights too, and the
    comparison would not show it. Everything else stays as it is now, see
    `healcore.torch.driver.weights.TorchWeights`.

    Args:
        live: the state of the run, in which the weights are found, and replaced for an evaluation.
        candidates: the parts that may be the parameters of each engine. If they are unknown for an
            engine, all floating arrays count as parameters.
    """

    def __init__(self, live: ProgramState, candidates: Sequence[Sequence[Part]]) -> None:
        self._live = live
        known: Sequence[Sequence[Part]] = []
        if all(candidates):
            known = candidates
        self._paths: set[str] = set()
        """Paths of all parts that may be parameters. Empty if they are unknown."""
        for parts in known:
            for part in parts:
                self._paths.update(part)
        self._averages = frozenset[str]()
        """Paths that are known not to be trained."""
        self._mixed = mixed_groups(known, self.arrays())
        """Equal parts of which not all are trained, until their movement has shown which."""
        self._owners = _owners(live, self._paths)
        """Path of each array of batch statistics -> paths of the parameters to which it belongs."""

    def copy(self) -> dict[str, Any]:
        """Copies the weights into host memory, to compare later weights with them.

        Returns:
            Path -> copy of each array. The copies stay valid when a step donates the state.
        """
        return {path: _copy(leaf) for path, leaf in self._compared().items()}

    def digest(self) -> str:
        """A digest of some values of each parameter, see `Driver.settings`.

        It shows after a crash whether the program has started with other initial weights. One sync
        per parameter.
        """
        found = hashlib.blake2b(digest_size=8)
        for leaf in self.arrays().values():
            part = leaf
            if isinstance(leaf, jax.Array):
                part = leaf.addressable_data(0)
            flat = np.asarray(jax.device_get(part)).reshape(-1)
            interval = max(1, flat.size // DIGESTED)
            found.update(flat[::interval][:DIGESTED].tobytes())
        return found.hexdigest()

    def nonfinite(self) -> list[str]:
        """Finds the parameters with a NaN or Inf, averages included. One sync.

        Returns:
            Their paths, such as ``['params']['w']``.
        """
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

        Replaces the current weights by `weights`, but keeps the random keys of the state. The
        live state is the same afterwards, also if `loss_fn` raises.

        Args:
            loss_fn: the program's function.
            batches: the batches to evaluate.
            weights: a result of `copy`, or None for the current weights.
            redraw: whether other random keys are used, to see by how much the loss varies.

        Returns:
            The results of `loss_fn` in host memory, one for each batch.

        Raises:
            WeightsChanged: the parameters have other names or shapes than `weights`.
            NotComparable: a step has donated a batch.
            SignalError: `loss_fn` has donated its state.
        """
        weights = weights or {}
        if weights:
            for path, leaf in self._compared().items():
                if getattr(weights.get(path), "shape", None) != leaf.shape:
                    raise WeightsChanged
        for leaf in jax.tree.leaves(batches):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise NotComparable("the step has donated the batch: remove it from donate_argnums")
        live = self._live.read()
        in_place = self._live.in_place
        replaced = self._without_averages(weights)
        if redraw:
            for path, leaf in tree_leaves_with_path(live):
                replaced[keystr(path)] = _other_key(leaf)
        state = _with_weights(live, replaced)
        try:
            if in_place and replaced:
                self._live.write(state)
            arguments = ()
            if not in_place:
                arguments = (self._live.whole(state),)
            losses = []
            for batch in batches:
                losses.append(jax.device_get(loss_fn(*arguments, batch)))
                if any(map(is_donated, jax.tree.leaves(live))):
                    raise SignalError(_DONATING)
            return losses
        finally:
            if in_place:
                self._live.write(live)

    def arrays(self, tree: PyTree = None) -> dict[str, Any]:
        """Finds the parameters, or all floating arrays if the parameters are unknown.

        The healing states do not count: they contain norms of gradients that were not applied.

        Args:
            tree: a state, or None for the live state.

        Returns:
            Path -> array, in the same order in all processes.
        """
        if tree is None:
            tree = self._live.read()
        found = {}
        for path, leaf in tree_leaves_with_path(without_heal_state(tree)):
            name = keystr(path)
            if self._paths:
                is_wanted = name in self._paths
            else:
                is_wanted = _is_floating(leaf)
            if is_wanted:
                found[name] = leaf
        return found

    def _compared(self) -> dict[str, Any]:
        """Path -> array that a comparison replaces: a parameter, or batch statistics."""
        found = self.arrays()
        if self._owners:
            for path, leaf in tree_leaves_with_path(self._live.read()):
                name = keystr(path)
                if name in self._owners:
                    found[name] = leaf
        return {path: leaf for path, leaf in found.items() if not self._is_average(path)}

    def _is_average(self, path: str) -> bool:
        """Whether an array is not trained, or batch statistics of parameters that are not."""
        return self._owners.get(path, frozenset({path})) <= self._averages

    def _without_averages(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The trained part of a copy, or nothing while it is unknown which part is trained.

        The first copy whose movement shows it settles this for the rest of the run.
        """
        if weights and self._mixed:
            before = self.arrays(_with_weights(self._live.read(), weights))
            found = untrained(self._mixed, before, self.arrays())
            if found is None:
                return {}
            self._averages = found
            self._mixed = []
        return {path: leaf for path, leaf in weights.items() if not self._is_average(path)}


def _owners(live: ProgramState, parameters: Collection[str]) -> dict[str, frozenset[str]]:
    """Path of each floating array of batch statistics -> paths of the parameters it belongs to.

    These are the parameters in the nearest enclosing part of the state that has any. Empty if the
    parameters are unknown: then the batch statistics count as parameters.
    """
    tree = live.read()
    leaves: dict[Any, Any] = dict(tree_leaves_with_path(tree))
    within: dict[Any, set[str]] = {}
    for path in leaves:
        name = keystr(path)
        if name in parameters:
            for depth in range(len(path) + 1):
                within.setdefault(path[:depth], set()).add(name)
    optimizers = {path for path, _ in nodes(_is_of_optimizer, tree)}
    found = {}
    for path in live.batch_statistics():
        parts = [path[:depth] for depth in reversed(range(len(path)))]
        if path in within or not optimizers.isdisjoint(parts):
            continue
        if not _is_floating(leaves[path]):
            continue
        for part in parts:  # the innermost part first
            if part in within:
                found[keystr(path)] = frozenset(within[part])
                break
    return found


def _is_floating(leaf: Leaf) -> bool:
    """Whether a leaf is an array of a floating dtype."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jnp.floating)


def _is_of_optimizer(node: PyTree) -> bool:
    """Whether a node is a state of optax or of `protect`."""
    return is_optax_state(node) or isinstance(node, ProtectState)


def _copy(leaf: Leaf) -> Any:
    """A copy in host memory, which a donation of the state does not delete."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        return jnp.copy(leaf)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))


def _other_key(leaf: Leaf) -> Any:
    """Another random key, or the leaf if it is not a key. Raw keys and counts are uint32."""
    kind = getattr(leaf, "dtype", None)
    if kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key):
        data = _other_key(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if kind == np.uint32:
        return leaf + 1
    return leaf


def _with_weights(live: Any, weights: Mapping[str, Any]) -> Any:
    """Replaces leaves of a state by `weights`."""

    def replaced(path: Path, leaf: Leaf) -> Any:
        saved = weights.get(keystr(path), leaf)
        if isinstance(saved, jax.Array) and saved is not leaf:
            return jax.device_put(saved, leaf.sharding)
        return saved

    return tree_map_with_path(replaced, live)
