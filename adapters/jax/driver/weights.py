"""`JaxWeights`: the part of the driver that copies weights, and evaluates a loss with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.core.signals import SignalError
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.driver.program_state import ProgramState
from healcore.jax.trees import Leaf, Path
from healcore.runtime.driver import Driver, WeightsChanged
from healcore.runtime.run.compare.loss_function import NotComparable

transferring = jax.transfer_guard("allow")
"""Decorator of methods that transfer arrays even if the program's transfer guard forbids it."""

_DONATING = (
    "loss_fn has donated its state, which the training needs: remove donate_argnums from loss_fn"
)


class JaxWeights(Driver):
    """Copies the weights of a state by path, and computes losses with earlier weights.

    The weights are the arrays that one comparison replaces together: the parameters that the
    optimizers train, and the batch statistics, which a layer in evaluation mode reads. With the
    current statistics, damage in them would spoil the loss of the earlier weights too, and the
    comparison would not show it. Everything else stays as it is now, such as an average of the
    weights. Where the state does not show which of several equal parts is trained, all of them are
    replaced, see `EngineEntry.parameters`.
    """

    _live: ProgramState
    """The state of the run."""
    _engines: list[EngineEntry]
    """The engines in this state."""
    _not_finite: frozenset[str] = frozenset()
    """Parameters that were not finite at the start, such as a mask of -Inf."""

    def copy_weights(self) -> dict[str, Any]:
        """See `Driver.copy_weights`. Path -> copy of each array.

        The copies stay valid when a step donates the state.
        """
        return {path: _copy(leaf) for path, leaf in self._leaves("batch_stats").items()}

    def digest(self) -> str:
        """A digest of some values of each parameter, see `Driver.settings`.

        It shows after a crash whether the program has started with other initial weights. One sync
        per parameter.
        """
        found = hashlib.blake2b(digest_size=8)
        for leaf in self._leaves().values():
            part = jnp.asarray(leaf).addressable_data(0)
            found.update(np.asarray(part[(slice(4),) * part.ndim]).tobytes())
        return found.hexdigest()

    def nonfinite_weights(self) -> list[str]:
        """See `Driver.nonfinite_weights`. Paths such as ``['params']['w']``. One sync.

        With the accumulators of optax.MultiSteps: a NaN stays there, and 0 * NaN is NaN.
        """
        found = {}
        for path, leaf in self._leaves("acc_grads").items():
            if path not in self._not_finite:
                found[path] = jnp.isfinite(leaf).all()
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
        """See `Driver.losses_of`. `loss_fn` takes state and batch, or of nnx objects the batch.

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
        replaced = dict(weights or {})
        if weights:
            for path, leaf in self._leaves("batch_stats").items():
                if getattr(weights.get(path), "shape", None) != leaf.shape:
                    raise WeightsChanged
        if any(map(_is_deleted, jax.tree.leaves(batches))):
            raise NotComparable("the step has donated the batch: remove it from donate_argnums")
        live = self._live.read()
        in_place = self._live.in_place
        if redraw:
            for path, leaf in tree_leaves_with_path(live):
                replaced[keystr(path)] = _other_key(leaf)

        def with_weights(path: Path, leaf: Leaf) -> Any:
            new = replaced.get(keystr(path), leaf)
            if isinstance(new, jax.Array) and new is not leaf:
                return jax.device_put(new, leaf.sharding)
            return new

        state = tree_map_with_path(with_weights, live)
        try:
            if in_place:
                self._live.write(state)
            arguments = ()
            if not in_place:
                arguments = (self._live.copy_with(state),)
            losses = []
            for batch in batches:
                losses.append(jax.device_get(loss_fn(*arguments, batch)))
                if any(map(_is_deleted, jax.tree.leaves(live))):
                    raise SignalError(_DONATING)
            return losses
        finally:
            if in_place:
                self._live.write(live)

    def _leaves(self, part: str = "") -> dict[str, Any]:
        """Path -> array of each parameter, and of the parts of the state with a name.

        In the order of the state, which is the same in all processes.
        """
        paths = set(self._live.leaves_within(part))
        for entry in self._engines:
            paths.update(entry.parameters)
        found = {}
        for path, leaf in tree_leaves_with_path(self._live.read()):
            if keystr(path) in paths:
                found[keystr(path)] = leaf
        return found


def _is_deleted(leaf: Leaf) -> bool:
    """Whether a compiled function has reused the memory of an array."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


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
