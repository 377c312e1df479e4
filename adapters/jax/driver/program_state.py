"""Converts the live state of a run to a pytree of arrays, and to the items of a checkpoint.

    state of the program      dict, TrainState, Equinox module, or nnx objects by name
        | read    ^ write
    tree of arrays            with the healing states
        | items   ^ restored
    items of a checkpoint     {"state": tree without healing states, as of a run without healcore,
                               "healcore.state": nothing, the mark of a Healer's checkpoint}

A dictionary has one item for each of its names instead of "state". Python numbers are saved as
they are. A restored leaf receives the weak type, sharding and commitment of the live leaf
(`to_live_leaf`), so that the step is not compiled again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from healcore.jax.heal_state import HealState, HealStateError, ProtectState
from healcore.jax.opt_state import with_heal_state, without_heal_state
from healcore.jax.optax_states import is_optax_state, reset_moments
from healcore.jax.trees import (
    Leaf,
    Path,
    PyTree,
    arrays_of,
    differences,
    forms,
    map_nodes,
    with_arrays,
)

STATE = "state"
"""Name of the only item of a state that is not a dictionary."""
MARK = "healcore.state"
"""Name of an item without content, which only checkpoints of a Healer have."""
_EMPTY = SimpleNamespace(state_dict=dict, optional=True)
"""The item of this name. A checkpoint of a run without healcore is restored without it."""


class ProgramState:
    """The state of a run as a pytree, such as a TrainState. `NnxProgramState` is for nnx objects.

    The driver has one such object. Programs keep their state in many forms: as a dictionary, a
    dataclass, an Equinox module with functions among its leaves, or nnx objects. This class hides
    the difference: `read` gives a tree of arrays, `write` takes one, and `items` and `restored` do
    the same for the content of a checkpoint.

    The values of a dictionary are the items of a checkpoint, the same in every process.

    Args:
        state: the state as the program passes it to the Healer.
    """

    in_place = False
    """Whether a step updates the state in place."""

    def __init__(self, state: PyTree) -> None:
        self.state = state
        """The state as the user passed it."""
        self._named = type(state) is dict and all(isinstance(name, str) for name in state)
        self._forms = forms(self.read())
        self._checked: Any = None
        """Structure and abstract values of the last state that passed `check`, or None."""

    def read(self) -> PyTree:
        """The state as a pytree of arrays, with optax's own state types. Copies nothing.

        Static leaves, such as the functions of an Equinox module, are None, see `trees`.
        """
        return arrays_of(self.state)

    def write(self, tree: PyTree) -> None:
        """Replaces the state, after a rollback or another edit of the Healer.

        Args:
            tree: a tree with the structure of `read`.
        """
        self.state = self.copy_with(tree)

    def copy_with(self, tree: PyTree) -> PyTree:
        """Makes a second state, and leaves the live one as it is.

        Args:
            tree: a tree with the structure of `read`.

        Returns:
            A state in the form in which the program passed its own, with the values of `tree`.
        """
        return with_arrays(self.state, tree)

    def node(self, getter: Callable[[PyTree], PyTree]) -> PyTree:
        """A node of an optimizer state, without a copy of the rest of the state.

        Each step reads the engines' states with it, and `read` would copy a tree of nnx objects.

        Args:
            getter: takes the node from `read`.
        """
        return getter(self.state)

    def trained(self, optimizer: str) -> PyTree:
        """A tree that contains the parameters of an optimizer, to find their names.

        Args:
            optimizer: name of the item of the state that contains the optimizer.
        """
        del optimizer  # a pytree does not say which part of it an optimizer trains
        return self.read()

    def leaves_within(self, name: str) -> list[str]:
        """Finds the floating arrays of the parts of the state that have a name.

        A layer in evaluation mode reads those of `batch_stats`, as flax calls its collection.

        Args:
            name: the key or attribute, at any depth.

        Returns:
            Their paths in `read`.
        """
        found = []
        for path, leaf in tree_leaves_with_path(self.read()):
            if is_floating(leaf) and name in map(key_name, path):
                found.append(keystr(path))
        return found

    def check(self) -> None:
        """Checks that the leaves have the first state's paths, shapes and dtypes.

        A state of another form would be saved, and no program could load the checkpoint. Called
        after each step. A compiled step returns the same `aval` objects, so that the comparison
        with the last state is fast.

        Raises:
            HealStateError: a leaf is new, missing, or of another shape or dtype.
        """
        tree = self.state
        if self.in_place:
            tree = self.read()
        leaves, structure = jax.tree.flatten(tree)
        found = structure, [getattr(leaf, "aval", type(leaf)) for leaf in leaves]
        if found == self._checked:
            return
        listed = differences(forms(self.read()), self._forms)
        if listed:
            error = HealStateError(
                "update takes the state with the structure, shapes and dtypes of the first state: "
                f"{listed}. Nothing was saved or replaced. Return "
                "the whole state, and nothing else, from the step, and cast changed arrays, "
                "x.astype(old.dtype). For NumPy arrays write "
                "`state = jax.tree.map(jnp.asarray, state)` before the Healer"
            )
            error.differences = listed
            raise error
        self._checked = found

    def items(self) -> dict[str, Any]:
        """The items of a checkpoint, without healing states. Copies nothing.

        Returns:
            Name of an item -> tree, and `MARK`. Moments that the next step resets are reset.

        Raises:
            HealStateError: as in `check`.
        """
        self.check()

        def with_reset(state: ProtectState) -> ProtectState:
            resets = state.heal_reset_moments
            if resets is None or not jax.device_get(resets):
                return state
            return state._replace(inner_state=reset_moments(state.inner_state, jnp.zeros_like))

        bare = without_heal_state(map_nodes(ProtectState, with_reset, self.read()))
        items = {STATE: bare}
        if self._named:
            items = dict(bare)
        return {**items, MARK: _EMPTY}

    def restored(self, items: Mapping[str, Any]) -> Any:
        """Makes a tree of a checkpoint's items and the live healing states.

        The store has checked that the items fit `items`.

        Args:
            items: the items of a checkpoint, as `items` has made them.

        Returns:
            A tree for `write` or `copy_with`.
        """
        tree = self.read()
        bare = without_heal_state(tree)
        saved = items.get(STATE)
        if self._named:
            saved = {name: items[name] for name in bare}

        def without_reset(state: ProtectState) -> ProtectState:
            live = state.heal_reset_moments
            if live is None:
                return state
            return state._replace(heal_reset_moments=to_live_leaf(np.zeros((), bool), live))

        new = with_heal_state(jax.tree.map(to_live_leaf, saved, bare), like=tree)
        return map_nodes(ProtectState, without_reset, new)


class NnxProgramState(ProgramState):
    """The state of a run as a mapping of names to pytrees and nnx objects, updated in place.

        state = {"model": model, "optimizer": optimizer}

    A step changes the Variables of these objects, and the program keeps the objects. So `write`
    sets the Variables instead of replacing the state.
    """

    in_place = True

    def read(self) -> Any:
        """The state as a pytree of the Variables' current arrays.

        Optimizer states keep optax's own types, and sown values (`nnx.Intermediate`) are not saved,
        because their structure changes from call to call.
        """
        from flax import nnx

        def arrays(live: Any) -> Any:
            if not isinstance(live, nnx.Pytree):
                return arrays_of(live)
            if not isinstance(live, nnx.Optimizer):
                return _arrays(nnx.state(live, nnx.Not(nnx.Intermediate)))
            # nnx.state would convert optax's named tuples to dictionaries.
            # A ModelAndOptimizer contains the model, which has a name of its own in the state.
            is_elsewhere = nnx.Any(nnx.PathContains("opt_state"), nnx.PathContains("model"))
            rest = nnx.state(live, nnx.Not(is_elsewhere))
            return {"opt_state": _arrays(live.opt_state), "rest": _arrays(rest)}

        return {name: arrays(live) for name, live in self.state.items()}

    def write(self, tree: PyTree) -> None:
        """Sets the Variables of nnx objects, and replaces pytrees.

        Args:
            tree: a tree with the structure of `read`.
        """
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

    def copy_with(self, tree: PyTree) -> Any:
        """Makes new nnx objects. The objects of the user keep their values.

        Args:
            tree: a tree with the structure of `read`.

        Returns:
            A mapping of the same names to the new objects.
        """
        from flax import nnx

        # All objects in one call, because they may share Variables.
        copy = NnxProgramState(nnx.clone(self.state))
        copy.write(tree)
        return copy.state

    def node(self, getter: Callable[[PyTree], PyTree]) -> PyTree:
        """See `ProgramState.node`. The node with the arrays of its Variables."""
        from flax import nnx

        roots = {}
        for name, live in self.state.items():
            roots[name] = live
            if isinstance(live, nnx.Optimizer):
                roots[name] = {"opt_state": live.opt_state}
        return _arrays(getter(roots))

    def trained(self, optimizer: str) -> Any:
        """The Variables of each module that the optimizer of this name trains.

        Args:
            optimizer: name of an item of the state. The optimizer's `wrt` says which Variables.
        """
        from flax import nnx

        wrt = getattr(self.state.get(optimizer), "wrt", nnx.Param)
        return self._variables(wrt)

    def leaves_within(self, name: str) -> list[str]:
        """See `ProgramState.leaves_within`. Each `nnx.BatchStat` is one of `batch_stats`.

        Args:
            name: the key or attribute, at any depth.
        """
        from flax import nnx

        found = super().leaves_within(name)
        if name == "batch_stats":
            found += map(keystr, floating_arrays(self._variables(nnx.BatchStat)))
        return found

    def _variables(self, kind: Any) -> dict[str, PyTree]:
        """Name of each module -> arrays of its Variables of a kind. Without optimizers."""
        from flax import nnx

        found = {}
        for name, live in self.state.items():
            if isinstance(live, nnx.Pytree) and not isinstance(live, nnx.Optimizer):
                found[name] = _arrays(nnx.state(live, kind))
        return found


def program_state_of(state: PyTree) -> ProgramState:
    """Wraps the state that a program passes to the Healer.

    Args:
        state: a pytree, or a mapping of names to pytrees and nnx objects.

    Raises:
        HealStateError: nnx objects are not the values of a mapping, so that they have no names.
    """
    nnx = sys.modules.get("flax.nnx")  # if not imported, the state cannot contain nnx objects
    if nnx is None:
        return ProgramState(state)

    def is_object(node: PyTree) -> bool:
        return isinstance(node, nnx.Pytree) and not isinstance(node, (nnx.State, nnx.Variable))

    if isinstance(state, Mapping) and any(map(is_object, state.values())):
        return NnxProgramState(dict(state))
    if any(map(is_object, jax.tree.leaves(state, is_leaf=is_object))):
        raise HealStateError(
            f"this {type(state).__name__} contains nnx objects: map names to them, as in "
            'state={"model": model, "optimizer": optimizer}'
        )
    return ProgramState(state)


def floating_arrays(tree: PyTree) -> list[Path]:
    """The paths of the floating arrays outside of the optimizers' states.

    Args:
        tree: the live state, as `ProgramState.read` returns it, or a part of it.
    """
    others = map_nodes(_is_of_optimizer, lambda _: None, tree)
    return [path for path, leaf in tree_leaves_with_path(others) if is_floating(leaf)]


def is_floating(leaf: Leaf) -> bool:
    """Whether a leaf is an array of a floating or complex dtype."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_of_optimizer(node: PyTree) -> bool:
    """Whether a node is a state of optax or of healcore."""
    return is_optax_state(node) or isinstance(node, ProtectState | HealState)


def key_name(key: Any) -> str:
    """The name of a key without brackets or quotes: ``params`` of ``['params']``, ``0`` of ``[0]``.

    Args:
        key: a key of a path, of any of the classes of `jax.tree_util`.
    """
    return keystr((key,), simple=True)


def short_names(paths: Iterable[Path]) -> list[str]:
    """The last key of each path as a name, or the whole path if a key occurs twice.

    Args:
        paths: paths of leaves, such as the numbers of an optimizer.
    """
    found = [*paths]
    names = [key_name(path[-1]) for path in found]
    if len(set(names)) < len(names):
        return [keystr(path) for path in found]
    return names


def _arrays(tree: PyTree) -> PyTree:
    """The tree with the array of each nnx.Variable in its place."""
    return map_nodes(sys.modules["flax.nnx"].Variable, lambda variable: variable[...], tree)


def to_live_leaf(new: Leaf, live: Leaf) -> Leaf:
    """Converts a restored leaf to the form of the live leaf, which a step may donate.

    An array of another weak type or placement would compile the step again. An array that is not
    committed to the live devices would be moved at each step. The saved dtype is kept.

    Args:
        new: the restored leaf.
        live: the leaf in its place in the live state.

    Returns:
        The leaf to put into the state.
    """
    if not isinstance(live, jax.Array):
        return new
    if not isinstance(new, jax.Array):
        new = np.asarray(new, getattr(new, "dtype", live.dtype))
    if getattr(live, "weak_type", False) and new.dtype == live.dtype:  # not of a random key
        new = jnp.zeros_like(live).at[...].set(new)
    is_array = isinstance(new, jax.Array)
    if is_array and (new.committed, new.sharding) == (live.committed, live.sharding):
        return new
    if not live.committed:
        return jnp.asarray(np.asarray(new))  # only an array from the host is uncommitted
    return jax.device_put(new, live.sharding)
