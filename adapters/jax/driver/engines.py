"""The engines of a run: finds their states in a train state, and replaces them.

A program passes its whole train state to the Healer, and each optimizer in the state that contains
`protect`, `heal` or `heal_zclip` has an engine. An optimizer state does not name the parameters
that it optimizes, and a state may contain several trees that look like them: an average of the
weights, a target network. An engine only knows how many gradients it judges. So a candidate is a
subtree outside of the optimizers with that many floating arrays:

    state                         engine with 4 gradients
    ├─ params      4 arrays       candidate, the likelier one by its name
    ├─ ema         4 arrays       candidate
    └─ opt_state                  never a candidate, though the moments have 4 arrays

Messages name these arrays, and comparisons of weights replace them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path, tree_map_with_path

from healcore.core.engine import Engine
from healcore.core.signals import SignalError
from healcore.jax import heal_state, optax_states
from healcore.jax.driver.program_state import (
    ProgramState,
    floating_arrays,
    is_floating,
    key_name,
    short_names,
    to_live_leaf,
)
from healcore.jax.heal_state import HealState, HealStateError, ProtectState, ScaleByHealLrState
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import check_second_iterates
from healcore.jax.trees import Leaf, Path, PyTree, map_nodes, node_at, nodes
from healcore.runtime.driver import Driver, WeightsChanged, check_engines
from healcore.runtime.run.witness.loss_function import NotComparable

_MASKS = (optax.MaskedState, optax.transforms.PartitionState)
"""States of optimizers whose parameters may be no subtree of the program's state."""


class EngineEntry(NamedTuple):
    """One engine of the run: where its state is, and what it judges.

    Found once at the start of a run. A run with two optimizers, such as a GAN, has two engines with
    the same policy.
    """

    name: str
    """Name of the engine in events and checkpoints: the item of the state that contains it, or the
    path of its HealState if this item contains several engines."""
    path: Path
    """Path of its HealState in the state."""
    parameters: tuple[str, ...]
    """Paths of the arrays that it trains. Of several equally likely candidates, all arrays, and
    without a candidate all floating arrays outside of the optimizers."""
    tensor_names: tuple[str, ...]
    """Names of the tensors whose gradients it judges."""

    def state_in(self, tree: PyTree) -> HealState:
        """Takes its HealState from a state.

        Args:
            tree: the live state.
        """
        return node_at(tree, self.path)

    def protected(self, tree: PyTree) -> ProtectState | None:
        """The state of its `protect`, or None for an engine in a chain.

        Args:
            tree: the live state.
        """
        owner = node_at(tree, self.path[:-1])
        if isinstance(owner, ProtectState):
            return owner
        return None


def find_engines(
    tree: PyTree, trained: Callable[[str], PyTree], engine: Engine
) -> list[EngineEntry]:
    """Finds the engines of a state.

    Called at the start of a run, and when the program has changed the structure of the state.

    Args:
        tree: the live state, as `ProgramState.read` returns it.
        trained: maps an item's name to a tree with the parameters that the item's optimizer trains.
        engine: the engine of the run's policy.

    Returns:
        One entry for each HealState, in the order of the tree.

    Raises:
        HealStateError: the state has no engine, or an engine belongs to another policy or holds
            several runs (`vmap`), or the policy cuts the learning rate of an optimizer with a
            second iterate, see `check_second_iterates`.
    """
    states = dict(nodes(HealState, tree))
    if not states:
        raise HealStateError(
            f"no healing state in this {type(tree).__name__}: pass a state that contains the state "
            "of an optimizer with protect(), heal() or heal_zclip(). nnx.state and nnx.split turn "
            'it into dictionaries: pass the objects, state={"model": model, "optimizer": optimizer}'
        )
    if engine.scales_lr and engine.mode != "observe" and nodes(ScaleByHealLrState, tree):
        check_second_iterates(tree, "scale_by_heal_lr")
    items = [_item_of(path) for path in states]
    masks = [path for path, _ in nodes(_MASKS, tree)]
    engines = []
    for item, (path, state) in zip(items, states.items(), strict=True):
        _check_is_one_run(path, state)
        heal_state.engine_state(engine, state)  # raises for another policy
        name = item
        if items.count(item) > 1:
            name = keystr(path)
        count = state.heal_leaf_norms.shape[0]
        arrays = floating_arrays(trained(item))
        if any(path[: len(mask)] == mask for mask in masks):
            arrays = []
        likeliest = _likeliest(arrays, count, path)
        parameters = [array for candidate in likeliest for array in candidate]
        names = tuple(map(keystr, parameters))
        tensor_names = names
        if len(likeliest) != 1:
            tensor_names = tuple(f"{name}: gradient {i} of {count}" for i in range(count))
        if not likeliest:
            names = tuple(map(keystr, floating_arrays(tree)))
        engines.append(EngineEntry(name, path, names, tensor_names))
    return engines


def _likeliest(arrays: Sequence[Path], count: int, engine: Path) -> list[list[Path]]:
    """The arrays of each of the likeliest candidates for the parameters of an engine.

    The likeliest candidate is called `params` or `model`, and its path is similar to the path of
    the engine's HealState: the networks of a GAN may be next to their optimizers.
    """
    ranked: dict[tuple[bool, int], list[list[Path]]] = {}
    for inside, path in _subtrees(arrays, count).items():
        is_named = bool(path) and key_name(path[-1]) in ("params", "model")
        alike = sum(key == other for key, other in zip(path, engine, strict=False))
        ranked.setdefault((is_named, alike), []).append([*inside])
    return ranked.get(max(ranked, default=(False, 0)), [])


def _subtrees(arrays: Sequence[Path], count: int) -> dict[tuple[Path, ...], Path]:
    """The paths of each `count` arrays that are all of a subtree -> path of the outermost one."""
    inside: dict[Path, list[Path]] = {}
    for path in arrays:
        for depth in range(len(path) + 1):
            inside.setdefault(path[:depth], []).append(path)
    found: dict[tuple[Path, ...], Path] = {}
    for path, paths in inside.items():  # an outer subtree before those within
        if len(paths) == count:
            found.setdefault(tuple(paths), path)
    return found


def fits_moments(tree: PyTree, entry: EngineEntry) -> bool:
    """Whether the moments of an optimizer have the shapes of its parameters.

    A tree that a step has returned by mistake has other parameters than its optimizer has moments.
    Without this check, such a tree would become the state of the run and would be saved.

    Args:
        tree: a state of another structure than the live one.
        entry: an engine in this state.
    """
    shapes = {}
    for path, leaf in tree_leaves_with_path(without_heal_state(tree)):
        if is_floating(leaf):
            shapes[path] = leaf.shape
    parameters = [shape for path, shape in shapes.items() if keystr(path) in entry.parameters]
    count = len(entry.tensor_names)
    optimizer = entry.path[: max(1, len(entry.path) - 1)]
    arrays = [path for path in shapes if path[: len(optimizer)] == optimizer]
    for moments in _subtrees(arrays, count):
        if [shapes[path] for path in moments] != parameters[:count]:
            return False
    return bool(parameters) and len(parameters) % count == 0


def _item_of(path: Path) -> str:
    """The item of the state that contains the node at a path. A state of one node is `state`."""
    if not path:
        return "state"
    return key_name(path[0])


def _check_is_one_run(path: Path, state: HealState) -> None:
    """Raises HealStateError if a HealState has the axis of a `vmap` or `pmap` over runs."""
    if jnp.ndim(state.heal_engine) > 1:
        raise HealStateError(
            f"the healing state at state{keystr(path)} holds "
            f"{len(state.heal_engine)} runs at once (a leading axis, from vmap or pmap), and a "
            "Healer saves and restores one run. Without a Healer, protect() heals each lane "
            "separately. For a Healer, pass the state of one run: shard its batch with jit or "
            "shard_map, and run the lanes of a sweep in sequence"
        )


def with_engines(
    engine: Engine,
    engines: Sequence[EngineEntry],
    tree: PyTree,
    data: Mapping[str, Mapping[str, Any]],
) -> PyTree:
    """Replaces the engine states that are named in `data`, for a rollback or a resume.

    Also sets the multiplier of `scale_by_heal_lr` if all these engines have the same one, because
    the program copies it from the decision, and the next decision comes after the next step.

    Args:
        engine: the engine of the run's policy.
        engines: the engines of the run.
        tree: the live state.
        data: name of an engine -> its state, as `Engine.to_dict` makes it.

    Returns:
        The new state, with the dtypes, weak types and placement of the live state.

    Raises:
        StateError: a state belongs to another policy or model, or the run has no such engine.
    """
    check_engines(data, [entry.name for entry in engines])
    states = {name: engine.from_dict(state) for name, state in data.items()}
    names = iter([entry.name for entry in engines])  # in the order of the tree

    def restored(live: HealState) -> HealState:
        name = next(names)
        if name not in states:
            return live
        return heal_state.with_engine_state(engine, live, states[name])

    tree = map_states(restored, tree)
    scales = {float(state.lr.scale) for state in states.values()}
    if len(scales) != 1 or engine.mode == "observe":
        return tree
    [scale] = scales

    def scaled(live: ScaleByHealLrState) -> ScaleByHealLrState:
        return ScaleByHealLrState(to_live_leaf(np.float32(scale), live.heal_lr_scale))

    return map_nodes(ScaleByHealLrState, scaled, tree)


def map_states(change: Callable[[HealState], HealState], tree: PyTree) -> PyTree:
    """Applies a change to the state of every engine, outside of a compiled step.

    Args:
        change: makes the new HealState of an old one, with the same structure and dtypes.
        tree: the live state.

    Returns:
        The state with the changed HealStates, which are placed on the devices as the old
        HealStates. Otherwise the next step would be compiled again.
    """

    def changed(live: HealState) -> HealState:
        return jax.tree.map(to_live_leaf, change(live), live)

    return map_nodes(HealState, changed, tree)


def number_names(engines: Sequence[EngineEntry], tree: PyTree) -> list[str]:
    """Names the numbers of the optimizers that can be held, see `optax_states`.

    Args:
        engines: the engines of the run.
        tree: the live state.

    Returns:
        The names of all numbers, in the order of the engines. A name is the argument of the
        optimizer, such as `b2`, or its path if an argument of this name occurs twice.
    """
    paths: list[Path] = []
    for entry in engines:
        owner = entry.protected(tree)
        if owner is not None:
            start = (*entry.path[:-1], GetAttrKey("inner_state"))
            places = optax_states.number_leaves(owner.inner_state)
            paths += [(*start, *place) for place in places]
    return short_names(paths)


def edit_numbers(states: Sequence[HealState]) -> list[int]:
    """The number of the Healer's last edit in each state. One sync.

    A rollback edits the state and counts the edit in it. A step keeps the number, so a state with a
    lower number was computed from the state before the rollback, and would undo it.
    """
    return [heal_state.edit_of(state) for state in states]


# -- weights ---------------------------------------------------------------------------------------

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
    ) -> list[Any]:
        """See `Driver.losses_of`. `loss_fn` takes state and batch, or of nnx objects the batch.

        Replaces the current weights by `weights`, but keeps the random keys of the state. The
        live state is the same afterwards, also if `loss_fn` raises.

        Args:
            loss_fn: the program's function.
            batches: the batches to evaluate.
            weights: a result of `copy`, or None for the current weights.

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
