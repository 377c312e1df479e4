"""Converts the live state of a run to a pytree of arrays, and to the items of a checkpoint.

    state of the program      dict, TrainState, Equinox module, or nnx objects by name
        | read    ^ write
    tree of arrays            with the healing states
        | items   ^ restored
    items of a checkpoint     {"state": tree without healing states, as of a run without healcore,
                               "healcore.side_state": what the tree cannot hold, see `ExactLeaves`}

A dictionary has one item for each of its names instead of "state". `leaf_forms.py` converts single
leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.console import first_of
from healcore.jax.driver.leaf_forms import to_live_leaf, to_saved_leaf
from healcore.jax.heal_state import HealState, HealStateError, ProtectState
from healcore.jax.opt_state import with_heal_state, without_heal_state
from healcore.jax.optax_states import is_optax_state
from healcore.jax.trees import (
    Leaf,
    Path,
    PyTree,
    arrays_of,
    is_number,
    is_static,
    map_nodes,
    nodes,
    with_arrays,
)

STATE = "state"
"""Name of the only item of a state that is not a dictionary."""
SIDE_STATE = "healcore.side_state"
"""Name of the item with `ExactLeaves`. Only checkpoints of a Healer have this item."""
_RESET_FIELD = "heal_reset_moments"
"""Field of `ProtectState` that belongs to the moments, not to the engine."""


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
        self._has_static = any(map(is_static, jax.tree.leaves(state)))
        self._texts = _texts(state)
        """The texts among the static leaves at the start, until one has changed."""
        tree = self.read()
        self._accumulates = bool(nodes(optax.MultiStepsState, tree))
        self._avals = _avals(tree)
        """Path -> abstract value of the leaf, with the widest dtype so far."""
        self._first = _avals(without_heal_state(tree))
        """Path -> abstract value of the leaf, in the first state without healing states."""
        self._checked: Any = None
        """Structure and abstract values of the last state that passed `check_if_new`, or None."""

    def read(self) -> PyTree:
        """The state as a pytree of arrays, with optax's own state types. Copies nothing.

        Static leaves, such as the functions of an Equinox module, are None, see `trees`.
        """
        if self._has_static:
            return arrays_of(self.state)
        return self.state

    def whole(self, tree: PyTree) -> PyTree:
        """Adds the program's own static leaves to a tree, so that the program can use it.

        Args:
            tree: a tree with the structure of `read`.

        Returns:
            A tree in the form in which the program passed its state.
        """
        if self._has_static:
            return with_arrays(self.state, tree)
        return tree

    def write(self, tree: PyTree) -> None:
        """Replaces the state, after a rollback or another edit of the Healer.

        Args:
            tree: a tree with the structure of `read`.
        """
        self.state = self.whole(tree)

    def copy_with(self, tree: PyTree) -> PyTree:
        """Makes a second state, and leaves the live one as it is.

        Args:
            tree: a tree with the structure of `read`.

        Returns:
            A state in the form in which the program passed its own, with the values of `tree`.
        """
        return self.whole(tree)

    def roots(self) -> PyTree:
        """A cheap tree with each optimizer state at its path in `read`.

        Each step reads the engines' states from it, and `read` would copy a tree of nnx objects.
        The leaves may be nnx Variables, so pass a leaf to `array_of`.
        """
        return self.state

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

    def check_if_new(self) -> None:
        """Calls `check` if the structure or an `aval` differs from the last state that passed.

        Called after each step. A compiled step returns the same `aval` objects, so that the
        comparison is fast.

        Raises:
            HealStateError: as in `check`.
        """
        if self.in_place:
            tree = self.read()
        else:
            tree = self.state
        leaves, structure = jax.tree.flatten(tree)
        found = structure, [getattr(leaf, "aval", type(leaf)) for leaf in leaves]
        if found != self._checked:
            self.check()
            self._checked = found

    def check(self) -> None:
        """Checks that the leaves have the first state's paths, shapes and dtypes.

        A state of another form would be saved, and no program could load the checkpoint. A step may
        widen a dtype, as the first steps of `optax.inject_hyperparams` and Prodigy do.

        Raises:
            HealStateError: a leaf is new, missing, or of another shape or dtype.
        """
        new = _avals(self.read())
        known = self._avals
        for path, aval in new.items():
            if _widens(known.get(path), aval):
                known[path] = aval
        forms = {path: _form(aval) for path, aval in new.items()}
        wanted = {path: _form(aval) for path, aval in known.items()}
        differences = []
        for path in {**wanted, **forms}:
            form = forms.get(path, "missing")
            known_form = wanted.get(path, "not present")
            if form != known_form:
                differences.append(f"state{path} is {form}, and was {known_form}")
        if differences:
            listed = first_of(differences, separator="; ")
            error = HealStateError(
                "update takes the state with the structure, shapes and dtypes of the first state: "
                f"{listed}. Nothing was saved or replaced. Return "
                "the whole state, and nothing else, from the step, and cast changed arrays, "
                "x.astype(old.dtype). For NumPy arrays write "
                "`state = jax.tree.map(jnp.asarray, state)` before the Healer"
            )
            error.differences = listed
            raise error

    def items(self) -> dict[str, Any]:
        """The items of a checkpoint, without healing states. Copies nothing.

        Returns:
            Name of an item -> tree, and `SIDE_STATE` -> `ExactLeaves`.

        Raises:
            HealStateError: as in `check`.
        """
        self.check_if_new()
        tree = self.read()
        kept = {}
        for path, leaf in tree_leaves_with_path(without_heal_state(tree)):
            if is_number(leaf) or _is_widened(path, leaf, self._first):
                kept[keystr(path)] = leaf
        for path, leaf in tree_leaves_with_path(tree):
            if _is_of_protect(path):
                kept[keystr(path)] = leaf
        # SIDE_STATE also if empty: a new process does not know which leaves a later step widens.
        return {**self._saved(), SIDE_STATE: ExactLeaves(kept)}

    def restored(self, items: Mapping[str, Any]) -> Any:
        """Makes a tree of a checkpoint's items and the live healing states.

        The store has checked that the items fit `items`. Zeroes an accumulator of optax.MultiSteps
        with NaN, which would stay there.

        Args:
            items: the items of a checkpoint, as `items` has made them.

        Returns:
            A tree for `write` or `copy_with`.
        """
        tree = self.read()
        bare = without_heal_state(tree)
        if self._named:
            saved = {name: items[name] for name in bare}
        else:
            saved = items[STATE]
        side_state = items.get(SIDE_STATE, {})

        def restored(path: Path, new: Any, live: Any) -> Any:
            return to_live_leaf(side_state.get(keystr(path), new), live)

        def with_side_state(path: Path, live: Any) -> Any:
            if not _is_of_protect(path):
                return live
            # The initial value, False, if the checkpoint lacks this field.
            return restored(path, np.zeros((), live.dtype), live)

        new = tree_map_with_path(restored, saved, bare)
        new = with_heal_state(map_nodes(optax.MultiStepsState, _without_nan, new), like=tree)
        return tree_map_with_path(with_side_state, new)

    def _saved(self) -> dict[str, Any]:
        """The items with the first state's dtypes: every checkpoint fits a new process."""
        tree = without_heal_state(self.read())

        def saved(path: Path, leaf: Leaf) -> Any:
            leaf = to_saved_leaf(leaf)
            if not _is_widened(path, leaf, self._first):
                return leaf
            # An Inf by overflow would make the checkpoint count as bad.
            return jnp.nan_to_num(leaf.astype(self._first[keystr(path)].dtype))

        tree = tree_map_with_path(saved, tree)
        if self._named:
            return dict(tree)
        return {STATE: tree}

    def changed_texts(self) -> list[str]:
        """Finds the texts in the state that the program has changed.

        A checkpoint holds no static leaves, so a restart does not know the new text. The driver
        warns of such a text.

        Returns:
            The paths of these texts. Empty after a call that has found some.
        """
        now = _texts(self.state)
        changed = [path for path, text in self._texts.items() if now.get(path) != text]
        if changed:
            self._texts = {}
        return changed

    def between_steps(self) -> bool:
        """Whether no optax.MultiSteps has accumulated gradients that no step has used yet.

        One sync if the optimizer accumulates.
        """
        if not self._accumulates:
            return True
        for _, accumulator in nodes(optax.MultiStepsState, self.read()):
            if jax.device_get(accumulator.mini_step):
                return False
        return True


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
            # A ModelAndOptimizer contains the model, which may have a name of its own.
            model = getattr(live, "model", None)
            elsewhere = {"opt_state"}
            if any(model is other for other in self.state.values()):
                elsewhere.add("model")
            kept = []
            for path, value in nnx.to_flat_state(nnx.state(live)):
                if path[0] not in elsewhere:
                    kept.append((path, value))
            rest = nnx.from_flat_state(kept)
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

    def roots(self) -> Any:
        """The optimizer states with Variables as leaves, without a copy of the model."""
        from flax import nnx

        roots = {}
        for name, live in self.state.items():
            if isinstance(live, nnx.Optimizer):
                roots[name] = {"opt_state": live.opt_state}
            else:
                roots[name] = live
        return roots

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
    optimizers = {path for path, _ in nodes(_is_of_optimizer, tree)}
    found = []
    for path, leaf in tree_leaves_with_path(tree):
        is_inside = any(path[:depth] in optimizers for depth in range(len(path) + 1))
        if not is_inside and is_floating(leaf):
            found.append(path)
    return found


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
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a key of a path has a name, a key or an index, not {key!r}")


def array_of(leaf: Leaf) -> Any:
    """The array of a leaf of `ProgramState.roots`, which may be an nnx.Variable.

    Args:
        leaf: an array or a Variable.
    """
    # Repeats `_is_variable` instead of calling it, because each step calls this function.
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(leaf, nnx.Variable):
        return leaf[...]
    return leaf


def _arrays(tree: PyTree) -> PyTree:
    """The tree with the array of each Variable in its place."""
    return jax.tree.map(array_of, tree, is_leaf=_is_variable)


def _is_variable(node: PyTree) -> bool:
    """Whether a node is an nnx.Variable. Does not import flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


class ExactLeaves:
    """The item of a checkpoint with what the other items cannot hold.

    The other items have the form of a plain run's checkpoint, so that a program without healcore
    can load them. They have arrays in the place of Python numbers, the first state's dtypes, and
    no fields of healcore. This item has the Python numbers, the leaves that a step has widened, and
    `ProtectState.heal_reset_moments`.

    Args:
        kept: path in the state -> value.
    """

    optional = True
    """A checkpoint of a run without healcore lacks this item, and can be restored."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Path in the state -> value. The store calls this method, as for any object."""
        return self._kept


def _is_widened(path: Path, leaf: Leaf, first: Mapping[str, Any]) -> bool:
    """Whether a leaf of the bare state has another dtype than in the first state."""
    return isinstance(leaf, jax.Array) and leaf.dtype != first[keystr(path)].dtype


def _without_nan(accumulator: optax.MultiStepsState) -> optax.MultiStepsState:
    """An accumulator of a checkpoint. One that holds NaN begins its accumulation again."""
    if all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(accumulator.acc_grads)):
        return accumulator

    def zeros(leaf: jax.Array) -> jax.Array:
        return to_live_leaf(jnp.zeros(leaf.shape, leaf.dtype), leaf)

    return accumulator._replace(
        mini_step=jax.tree.map(zeros, accumulator.mini_step),
        acc_grads=jax.tree.map(zeros, accumulator.acc_grads),
    )


def _is_of_protect(path: Path) -> bool:
    """Whether a path leads to `ProtectState.heal_reset_moments`."""
    return bool(path) and getattr(path[-1], "name", None) == _RESET_FIELD


def _texts(state: PyTree) -> dict[str, str | bytes]:
    """Path -> text, of the leaves that are texts."""
    found = {}
    for path, leaf in tree_leaves_with_path(state):
        if isinstance(leaf, str | bytes):
            found[keystr(path)] = leaf
    return found


def is_donated(leaf: Leaf) -> bool:
    """Whether a compiled function has reused the memory of the array, which is unreadable then."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def check_not_donated(tree: PyTree) -> None:
    """Raises HealStateError if an array of the tree was donated."""
    for path, leaf in tree_leaves_with_path(tree):
        if is_donated(leaf):
            raise HealStateError(
                f"state{keystr(path)} was donated to a compiled function, so its values are gone. "
                "Pass the state that this function has returned, or call it with a copy: "
                "jax.tree.map(jnp.copy, state)"
            )


def _avals(tree: PyTree) -> dict[str, Any]:
    """Path -> abstract value of the leaf."""
    found = {}
    for path, leaf in tree_leaves_with_path(tree):
        saved = to_saved_leaf(leaf)
        found[keystr(path)] = getattr(saved, "aval", saved)
    return found


def _widens(old: Any, new: Any) -> bool:
    """Whether the dtype of `new` holds every number of `old`, or the type of `old` is weak."""
    before = getattr(old, "dtype", np.dtype(object))
    after = getattr(new, "dtype", np.dtype(object))
    are_numbers = jnp.issubdtype(before, jnp.number) and jnp.issubdtype(after, jnp.number)
    if not are_numbers or old.shape != new.shape:
        return False
    return getattr(old, "weak_type", False) or jnp.promote_types(before, after) == after


def _form(leaf: Leaf) -> str:
    """Dtype and shape."""
    if not hasattr(leaf, "dtype"):
        return "no array"
    return f"{leaf.dtype}{tuple(leaf.shape)}"
