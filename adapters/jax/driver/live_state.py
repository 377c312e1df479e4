"""Converts the live state of a run to a pytree of arrays, and to the items of a checkpoint.

A checkpoint stores only dtypes. A restored leaf also receives the weak type, sharding and
commitment of the live leaf, so that the step is not compiled again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.console import first_of
from healcore.jax.array_leaves import arrays_of, is_number, is_static, with_arrays
from healcore.jax.heal_state import HealStateError, map_nodes, nodes
from healcore.jax.opt_state import with_heal_state, without_heal_state

STATE = "state"
"""Name of the only item of a state that is not a dictionary."""
SIDE_STATE = "healcore.side_state"
BATCH_STATS = "batch_stats"
"""flax's name of the collection with the statistics of batch normalization."""
_RESETS = "heal_reset_moments"
"""Field of `ProtectState` that belongs to the moments, not to the engine."""


class LiveState:
    """The state of a run as a pytree, such as a TrainState. `NnxLiveState` is for nnx objects.

    The values of a dictionary are the items of a checkpoint, the same in every process.
    """

    in_place = False
    """Whether a step updates the state in place."""

    def __init__(self, state: Any) -> None:
        self.state = state
        """The state as the user passed it."""
        self._named = type(state) is dict and all(isinstance(name, str) for name in state)
        self._has_static = any(map(is_static, jax.tree.leaves(state)))
        self._texts = _texts(state)
        """The texts among the static leaves at the start, until one has changed."""
        tree = self.read()
        self._accumulates = bool(nodes(optax.MultiStepsState, tree))
        self._avals = _avals(tree)
        """Path -> abstract value of the leaf, with the widest dtype so far."""
        self._first = _avals(without_heal_state(tree))
        """The same for the first state without healing states."""
        self._checked: Any = None
        """Structure and abstract values of the last state that passed `check_if_new`, or None."""

    def read(self) -> Any:
        """The state as a pytree of arrays, with optax's own state types. Copies nothing.

        Static leaves, such as the functions of an Equinox module, are None, see `array_leaves`.
        """
        return arrays_of(self.state) if self._has_static else self.state

    def whole(self, tree: Any) -> Any:
        """A tree with the structure of `read`, and with the program's own static leaves."""
        return with_arrays(self.state, tree) if self._has_static else tree

    def write(self, tree: Any) -> None:
        """Replaces the state by a tree with the structure of `read`."""
        self.state = self.whole(tree)

    def copy_with(self, tree: Any) -> Any:
        """A copy of the state as the user passed it, with the values of a tree as of `read`."""
        return self.whole(tree)

    def roots(self) -> Any:
        """A cheap tree with each optimizer state at its path in `read`. Leaves need `array_of`."""
        return self.state

    def trained(self, optimizer: str) -> Any:
        """A tree that contains the parameters of an optimizer, for their names."""
        return self.read()

    def batch_statistics(self) -> list[tuple[Any, ...]]:
        """Path in `read` of each leaf of a part that is called `batch_stats`, as flax calls it."""
        leaves = tree_leaves_with_path(self.read())
        return [path for path, _ in leaves if any(_is_named(key, BATCH_STATS) for key in path)]

    def check_if_new(self) -> None:
        """Calls `check` if the structure or an `aval` differs from the last state that passed.

        A compiled step returns the same `aval` objects, so that the comparison is fast.
        """
        leaves, structure = jax.tree.flatten(self.read() if self.in_place else self.state)
        found = structure, [getattr(leaf, "aval", type(leaf)) for leaf in leaves]
        if found != self._checked:
            self.check()
            self._checked = found

    def check(self) -> None:
        """Raises HealStateError unless the leaves have the first state's paths, shapes and dtypes.

        A step may widen a dtype, as the first steps of `optax.inject_hyperparams` and Prodigy do.
        """
        new = _avals(self.read())
        known = self._avals
        known |= {path: each for path, each in new.items() if _widens(known.get(path), each)}
        forms, wanted = ({p: _form(e) for p, e in avals.items()} for avals in (new, known))
        wrong = [path for path in {**wanted, **forms} if forms.get(path) != wanted.get(path)]
        if wrong:
            differences = [
                f"state{path} is {forms.get(path, 'missing')}, and was "
                f"{wanted.get(path, 'not present')}"
                for path in wrong
            ]
            raise HealStateError(
                "update takes the state with the structure, shapes and dtypes of the first state: "
                f"{first_of(differences, separator='; ')}. Nothing was saved or replaced. Return "
                "the whole state, and nothing else, from the step, and cast changed arrays, "
                "x.astype(old.dtype). For NumPy arrays write "
                "`state = jax.tree.map(jnp.asarray, state)` before the Healer"
            )

    def items(self) -> dict[str, Any]:
        """The items of a checkpoint by name, without healing states. Copies nothing.

        Raises HealStateError like `check`.
        """
        self.check_if_new()
        tree = self.read()
        whole, bare = map(tree_leaves_with_path, (tree, without_heal_state(tree)))
        kept = [(p, e) for p, e in bare if is_number(e) or _is_widened(p, e, self._first)]
        kept += [(path, leaf) for path, leaf in whole if _is_of_protect(path)]
        # SIDE_STATE also if empty: a new process does not know which leaves a later step widens.
        return {**self._saved(), SIDE_STATE: SideState({keystr(p): leaf for p, leaf in kept})}

    def restored(self, items: Mapping[str, Any]) -> Any:
        """Makes a tree of a checkpoint's items and the live healing states.

        The store has checked that the items fit `items`. Zeroes the accumulators of
        optax.MultiSteps, because a NaN would stay in them.
        """
        tree = self.read()
        bare = without_heal_state(tree)
        saved = {name: items[name] for name in bare} if self._named else items[STATE]
        side_state = items.get(SIDE_STATE, {})

        def restored(path: Any, new: Any, live: Any) -> Any:
            return as_live(side_state.get(keystr(path), new), live)

        def with_side_state(path: Any, live: Any) -> Any:
            if not _is_of_protect(path):
                return live
            # The initial value, False, if the checkpoint lacks this field.
            return restored(path, np.zeros((), live.dtype), live)

        new = tree_map_with_path(restored, saved, bare)
        new = with_heal_state(map_nodes(optax.MultiStepsState, _empty_accumulator, new), like=tree)
        return tree_map_with_path(with_side_state, new)

    def _saved(self) -> dict[str, Any]:
        """The items with the first state's dtypes: every checkpoint fits a new process."""
        tree = without_heal_state(self.read())

        def saved(path: Any, leaf: Any) -> Any:
            leaf = _as_saved(leaf)
            if not _is_widened(path, leaf, self._first):
                return leaf
            # An Inf by overflow would make the checkpoint count as bad.
            return jnp.nan_to_num(leaf.astype(self._first[keystr(path)].dtype))

        tree = tree_map_with_path(saved, tree)
        return dict(tree) if self._named else {STATE: tree}

    def changed_texts(self) -> list[str]:
        """Paths of the texts in the state that the program has changed, reported once.

        A restart does not know the new text, because a checkpoint holds no static leaves.
        """
        now = _texts(self.state)
        changed = [path for path, text in self._texts.items() if now.get(path) != text]
        self._texts = {} if changed else self._texts
        return changed

    def between_steps(self) -> bool:
        """Whether nothing is accumulated. One sync if the optimizer accumulates."""
        if not self._accumulates:
            return True
        steps = nodes(optax.MultiStepsState, self.read())
        return not any(jax.device_get(each.mini_step) for _, each in steps)


class NnxLiveState(LiveState):
    """The state of a run as a mapping of names to pytrees and nnx objects, updated in place."""

    in_place = True

    def read(self) -> Any:
        """The state as a pytree of the Variables' current arrays."""
        from flax import nnx

        def arrays(live: Any) -> Any:
            if not isinstance(live, nnx.Pytree):
                return arrays_of(live)
            if not isinstance(live, nnx.Optimizer):
                return _arrays(nnx.state(live, nnx.Not(nnx.Intermediate)))
            # nnx.state would convert optax's named tuples to dictionaries.
            # A ModelAndOptimizer contains the model, which may have a name of its own.
            model = getattr(live, "model", None)
            named = {"model"} if any(model is each for each in self.state.values()) else set()
            flat = nnx.to_flat_state(nnx.state(live))
            rest = nnx.from_flat_state([x for x in flat if x[0][0] not in {"opt_state", *named}])
            return {"opt_state": _arrays(live.opt_state), "rest": _arrays(rest)}

        return {name: arrays(live) for name, live in self.state.items()}

    def write(self, tree: Any) -> None:
        """Sets the Variables of nnx objects, and replaces pytrees."""
        from flax import nnx

        for name, new in tree.items():
            live = self.state[name]
            if isinstance(live, nnx.Optimizer):
                nnx.update(live.opt_state, nnx.state(new["opt_state"]))
                nnx.update(live, new["rest"])
            elif isinstance(live, nnx.Pytree):
                nnx.pop(live, nnx.Intermediate)  # a `loss_fn` that sows would change the structure
                nnx.update(live, new)
            else:
                self.state[name] = with_arrays(live, new)

    def copy_with(self, tree: Any) -> Any:
        """New nnx objects. The objects of the user keep their values."""
        from flax import nnx

        copy = NnxLiveState(nnx.clone(self.state))  # together, because objects may share Variables
        copy.write(tree)
        return copy.state

    def roots(self) -> Any:
        """The optimizer states with Variables as leaves."""
        from flax import nnx

        return {
            name: {"opt_state": live.opt_state} if isinstance(live, nnx.Optimizer) else live
            for name, live in self.state.items()
        }

    def trained(self, optimizer: str) -> Any:
        """The Variables of each module that the optimizer of this name trains."""
        from flax import nnx

        wrt = getattr(self.state.get(optimizer), "wrt", nnx.Param)
        return {
            name: _arrays(nnx.state(each, wrt))
            for name, each in self.state.items()
            if isinstance(each, nnx.Pytree) and not isinstance(each, nnx.Optimizer)
        }

    def batch_statistics(self) -> list[tuple[Any, ...]]:
        """Also the path of each `nnx.BatchStat`, in `read`."""
        from flax import nnx

        found = {
            name: _arrays(nnx.state(each, nnx.BatchStat))
            for name, each in self.state.items()
            if isinstance(each, nnx.Pytree) and not isinstance(each, nnx.Optimizer)
        }
        return [*super().batch_statistics(), *(path for path, _ in tree_leaves_with_path(found))]


def live_state_of(state: Any) -> LiveState:
    """Wraps a user's state. Raises HealStateError for nnx objects without names."""
    nnx = sys.modules.get("flax.nnx")  # if not imported, the state cannot contain nnx objects
    if nnx is None:
        return LiveState(state)

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree) and not isinstance(node, (nnx.State, nnx.Variable))

    if isinstance(state, Mapping) and any(map(is_object, state.values())):
        return NnxLiveState(dict(state))
    if any(map(is_object, jax.tree.leaves(state, is_leaf=is_object))):
        raise HealStateError(
            f"this {type(state).__name__} contains nnx objects: map names to them, as in "
            'state={"model": model, "optimizer": optimizer}'
        )
    return LiveState(state)


def array_of(leaf: Any) -> Any:
    """The array of a leaf of `LiveState.roots`, which may be an nnx.Variable."""
    nnx = sys.modules.get("flax.nnx")  # as in `_is_variable`, without a call: each step asks
    if nnx is not None and isinstance(leaf, nnx.Variable):
        return leaf[...]
    return leaf


def _arrays(tree: Any) -> Any:
    return jax.tree.map(array_of, tree, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


class SideState:
    """What the other items cannot hold: Python numbers, `_RESETS` fields and widened leaves."""

    optional = True  # checkpoints of a run without healcore lack this item

    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Path in the state -> value."""
        return self._kept


def as_live(new: Any, live: Any) -> Any:
    """Converts a restored leaf to the form of the live leaf: a number, or a donatable array.

    Keeps the saved dtype. It differs from the live one if a step between them has widened it.
    """
    dtype = getattr(new, "dtype", None)
    if is_number(live):
        if dtype in (None, _as_saved(live).dtype):
            return type(live)(np.asarray(new).item())
        return jnp.asarray(new)
    if not isinstance(live, jax.Array):
        return new
    if jnp.issubdtype(live.dtype, jax.dtypes.prng_key):
        data = _put_like(jax.random.key_data(new), live)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if not isinstance(new, jax.Array):
        new = np.asarray(new, dtype or live.dtype)
    new = _put_like(new, live)
    if not live.weak_type or new.weak_type:
        return new
    weak = jnp.full(new.shape, 0.0 if jnp.issubdtype(new.dtype, jnp.floating) else 0)
    return new if weak.dtype != new.dtype else weak.at[...].set(new)  # no weak type of this dtype


def _put_like(new: Any, live: jax.Array) -> jax.Array:
    """Puts an array on the devices of the live array, with the same commitment."""
    if not live.committed and not (isinstance(new, jax.Array) and not new.committed):
        return jnp.asarray(np.asarray(new))  # only an array from the host is uncommitted
    is_there = isinstance(new, jax.Array) and new.committed == live.committed
    return new if is_there and new.sharding == live.sharding else jax.device_put(new, live.sharding)


def _is_widened(path: Any, leaf: Any, first: Mapping[str, Any]) -> bool:
    """Whether a leaf of the bare state has another dtype than in the first state."""
    return isinstance(leaf, jax.Array) and leaf.dtype != first[keystr(path)].dtype


def _as_saved(leaf: Any) -> Any:
    """Converts a Python number to an array for a checkpoint, as `jit` does.

    A TrainState's `step` is a number at the start and an array after the first compiled step, and
    both must have the same form. `SideState` keeps the number.
    """
    if not is_number(leaf):
        return leaf
    zero = jnp.asarray(type(leaf)())
    if zero.dtype == jnp.bool_:
        return jnp.asarray(leaf)
    limits = jnp.finfo(zero.dtype) if type(leaf) is float else jnp.iinfo(zero.dtype)
    # An Inf, for instance by overflow, would make the checkpoint count as bad.
    return jnp.asarray(leaf) if abs(leaf) <= limits.max else zero


def _empty_accumulator(accumulator: optax.MultiStepsState) -> optax.MultiStepsState:
    count, gradients = jax.tree.map(
        lambda leaf: as_live(jnp.zeros(leaf.shape, leaf.dtype), leaf),
        (accumulator.mini_step, accumulator.acc_grads),
    )
    return accumulator._replace(mini_step=count, acc_grads=gradients)


def _is_of_protect(path: tuple[Any, ...]) -> bool:
    return bool(path) and getattr(path[-1], "name", None) == _RESETS


def _is_named(key: Any, name: str) -> bool:
    """Whether a key of a path is this attribute, or this key of a mapping."""
    return name in (getattr(key, "name", None), getattr(key, "key", None))


def _texts(state: Any) -> dict[str, str | bytes]:
    leaves = tree_leaves_with_path(state)
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, str | bytes)}


def _avals(tree: Any) -> dict[str, Any]:
    """Path -> abstract value of the leaf."""
    saved = ((keystr(path), _as_saved(leaf)) for path, leaf in tree_leaves_with_path(tree))
    return {path: getattr(leaf, "aval", leaf) for path, leaf in saved}


def _widens(old: Any, new: Any) -> bool:
    """Whether the dtype of `new` holds every number of `old`, or the type of `old` is weak."""
    kinds = [getattr(each, "dtype", np.dtype(object)) for each in (old, new)]
    if not all(jnp.issubdtype(kind, jnp.number) for kind in kinds) or old.shape != new.shape:
        return False
    return getattr(old, "weak_type", False) or jnp.promote_types(*kinds) == kinds[1]


def _form(leaf: Any) -> str:
    """Dtype and shape."""
    return f"{leaf.dtype}{tuple(leaf.shape)}" if hasattr(leaf, "dtype") else "no array"
