"""Divides a JAX state into the items of a checkpoint, and puts a restored state together.

A checkpoint keeps only dtypes. Restored leaves also get the weak type, sharding and commitment of
the live ones, so that a step is not compiled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from healcore.jax.state import HealStateError, map_nodes, nodes
from healcore.jax.state_transfer import with_heal_state, without_heal_state
from healcore.runtime.store.errors import StateMismatch

STATE = "state"
"""Name of the item for a state without names."""
SIDE_STATE = "healcore.side_state"
_PROTECT = ("heal_update_norm", "heal_reset_moments")
"""Fields of `ProtectState` that belong to the parameters and moments, not to the engine."""
_SHOWN = 3
"""Differences that a message names."""
_RETURN_ALL = "return the whole state from the step, and cast what has changed, x.astype(old.dtype)"
_NO_NUMPY = (
    "the run began with NumPy arrays, whose dtypes JAX does not keep. Write "
    "`state = jax.tree.map(jnp.asarray, state)` before the Healer"
)


class CheckpointLayout:
    """The items of one run's state, the same in every process: the parts of `tree` if `named`."""

    def __init__(self, tree: Any, *, named: bool) -> None:
        self._named = named
        self._accumulates = bool(nodes(optax.MultiStepsState, tree))
        self._forms = _forms(tree)
        self._from_numpy = _forms_in_jax(tree)
        self._checked: tuple[Any, list[Any]] | None = None
        """Structure and abstract values of the last state that fitted."""

    def check(self, tree: Any) -> None:
        """Raises HealStateError unless the leaves have the first state's paths, shapes and dtypes.

        A compiled step returns the same `aval` objects every time, which are compared first.
        """
        leaves, structure = jax.tree.flatten(tree)
        found = structure, [getattr(leaf, "aval", None) or _kind(leaf) for leaf in leaves]
        if found == self._checked:
            return
        forms, wanted = _forms(tree), self._forms
        for index, part in enumerate(tree if isinstance(tree, tuple) else ()):
            if _forms(part) == wanted:
                raise HealStateError(
                    f"update takes the state alone, got a tuple whose element {index} is the state:"
                    " write `state, loss = step(healer.state, batch); healer.update(state)`"
                )
        wrong = [path for path in {**wanted, **forms} if forms.get(path) != wanted.get(path)]
        if wrong:
            lines = [
                f"state{path} is {forms.get(path, 'missing')}, and was "
                f"{wanted.get(path, 'not there')}"
                for path in wrong[:_SHOWN]
            ]
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            what = _RETURN_ALL
            if all(path in forms and forms[path] == self._from_numpy.get(path) for path in wrong):
                what = _NO_NUMPY
            raise HealStateError(
                "update takes the state in the structure, shapes and dtypes that the run began "
                f"with: {'; '.join(lines)}{more}. Nothing was saved or replaced: {what}"
            )
        self._checked = found

    def items(self, tree: Any) -> dict[str, Any]:
        """The items of a state by their names."""
        side_state = SideState(tree)
        return {**self._parts(_saved(tree)), **({SIDE_STATE: side_state} if side_state else {})}

    def restored(self, items: Mapping[str, Any], tree: Any) -> Any:
        """The restored state with the healing state of the live `tree`.

        StateMismatch if it does not fit. Accumulators of optax.MultiSteps are zeroed, because a NaN
        would stay in them.
        """
        wanted = self._parts(_saved(tree))
        missing = [f'there is no "{name}" in it' for name in wanted if name not in items]
        if missing:
            raise StateMismatch(None, missing)
        found = {name: items[name] for name in wanted}
        wrong = [line for name in wanted for line in _differences(name, found[name], wanted[name])]
        if wrong:
            raise StateMismatch(None, wrong)
        side_state = items.get(SIDE_STATE, {})
        bare = jax.tree_util.tree_map_with_path(
            lambda path, new, live: as_live(side_state.get(keystr(path), new), live),
            found if self._named else found[STATE],
            without_heal_state(tree),
        )
        new = with_heal_state(map_nodes(optax.MultiStepsState, _emptied, bare), like=tree)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _kept(side_state, path, leaf) if _is_kept(path) else leaf, new
        )

    def between_steps(self, tree: Any) -> bool:
        """Whether nothing is accumulated. Reads the device if the optimizer accumulates."""
        if not self._accumulates:
            return True
        return not any(int(each.mini_step) for _, each in nodes(optax.MultiStepsState, tree))

    def _parts(self, tree: Any) -> dict[str, Any]:
        return dict(tree) if self._named else {STATE: tree}


class SideState:
    """What the other items cannot hold: Python numbers, and `_PROTECT` of each `ProtectState`."""

    optional = True  # checkpoints of a run without healcore do not have it

    def __init__(self, tree: Any) -> None:
        bare = jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
        whole = jax.tree_util.tree_leaves_with_path(tree)
        self._kept = {
            **{keystr(path): leaf for path, leaf in bare if _is_number(leaf)},
            **{keystr(path): leaf for path, leaf in whole if _is_kept(path)},
        }

    def __bool__(self) -> bool:
        return bool(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """The values by their path in the state."""
        return self._kept


def as_live(new: Any, live: Any) -> Any:
    """A restored leaf in the form of the live one: an array, which may be donated, or a number."""
    if _is_number(live):
        return type(live)(np.asarray(new).item())
    if not isinstance(live, jax.Array):
        return new
    if jnp.issubdtype(live.dtype, jax.dtypes.prng_key):
        data = _placed(jax.random.key_data(new), live)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if not isinstance(new, jax.Array):
        new = np.asarray(new, live.dtype)
    new = _placed(new, live)
    return _weak(new) if live.weak_type and not new.weak_type else new


def _saved(tree: Any) -> Any:
    return jax.tree.map(_as_saved, without_heal_state(tree))


def _kept(side_state: Mapping[str, Any], path: tuple[Any, ...], live: Any) -> Any:
    """The restored value; 0 or False, as at the start of a run, if the checkpoint has none."""
    return as_live(side_state.get(keystr(path), np.zeros((), live.dtype)), live)


def _differences(name: str, found: Any, wanted: Any) -> list[str]:
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return [f'"{name}" has another structure']
    pairs = zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True)
    return [
        f"{name}{keystr(path)} is {_form(new)} in it, {_form(live)} in the live state"
        for (path, live), new in pairs
        if _form(new) != _form(live)
    ]


def _emptied(accumulator: optax.MultiStepsState) -> optax.MultiStepsState:
    count, gradients = jax.tree.map(
        lambda leaf: as_live(jnp.zeros(leaf.shape, leaf.dtype), leaf),
        (accumulator.mini_step, accumulator.acc_grads),
    )
    return accumulator._replace(mini_step=count, acc_grads=gradients)


def _is_kept(path: tuple[Any, ...]) -> bool:
    return bool(path) and getattr(path[-1], "name", None) in _PROTECT


def _kind(leaf: Any) -> tuple[Any, ...]:
    return type(leaf), getattr(leaf, "dtype", None), getattr(leaf, "shape", None)


def _forms(tree: Any) -> dict[str, str]:
    """The form of each leaf, by its path."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): _form(_as_saved(leaf)) for path, leaf in found}


def _forms_in_jax(tree: Any) -> dict[str, str]:
    """The form that a compiled step returns for each NumPy array or scalar, by its path."""
    return {
        keystr(path): f"{jax.dtypes.canonicalize_dtype(leaf.dtype)}{leaf.shape}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, (np.ndarray, np.generic))
    }


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, int, float)


def _as_saved(leaf: Any) -> Any:
    """A leaf as it is saved: a Python number becomes the array that jit makes of it.

    A TrainState's `step` starts as a number and is an array after the first compiled step, and the
    two must match. `SideState` keeps the number.
    """
    if not _is_number(leaf):
        return leaf
    zero = jnp.asarray(type(leaf)())
    if zero.dtype == jnp.bool_:
        return jnp.asarray(leaf)
    limits = jnp.finfo(zero.dtype) if type(leaf) is float else jnp.iinfo(zero.dtype)
    # An Inf, also one by overflow, would make the checkpoint count as bad.
    return jnp.asarray(leaf) if abs(leaf) <= limits.max else zero


def _form(leaf: Any) -> str:
    """Shape and dtype, in which a restored leaf and `_as_saved` of the live one must agree."""
    return f"{leaf.dtype}{tuple(leaf.shape)}" if hasattr(leaf, "dtype") else "no array"


def _placed(new: Any, live: jax.Array) -> jax.Array:
    """The array, committed where the live one is."""
    if isinstance(new, jax.Array) and new.committed == live.committed:
        return new if new.sharding == live.sharding else jax.device_put(new, live.sharding)
    if live.committed:
        return jax.device_put(new, live.sharding)
    return jnp.asarray(np.asarray(new))  # an array is uncommitted only if it comes from the host


def _weak(array: jax.Array) -> jax.Array:
    """The same numbers, weakly typed where a weak type of this dtype exists."""
    zero = 0.0 if jnp.issubdtype(array.dtype, jnp.floating) else 0
    weak = jnp.full(array.shape, zero)
    if weak.dtype != array.dtype:
        return array
    return weak.at[...].set(array)
