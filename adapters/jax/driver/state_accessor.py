"""Reads and writes the live state, a pytree or nnx objects, as one pytree of arrays.

In it optax's states keep their types.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax

from healcore.jax.state import HealStateError


class StateAccessor:
    """Accesses a pytree: a TrainState, a tuple, a dictionary."""

    in_place = False
    """Whether a step updates the state in place."""

    def __init__(self, state: Any) -> None:
        self.state = state
        """The state as the user passed it."""
        self.named = type(state) is dict and all(isinstance(name, str) for name in state)
        """Whether its top level maps names to parts."""

    def read(self) -> Any:
        """The state as a pytree of arrays; nothing is copied."""
        return self.state

    def write(self, tree: Any) -> None:
        """Replaces the state by a tree of the structure of `read`."""
        self.state = tree

    def roots(self) -> Any:
        """A cheap tree with every optimizer state at its path in `read`; for leaves see `value`."""
        return self.state

    def trained(self) -> Any:
        """A tree that contains the parameters, for their names."""
        return self.state


class NnxAccessor(StateAccessor):
    """Accesses a mapping of names to nnx objects, updated in place, and pytrees."""

    in_place = True

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(dict(state))
        self.named = True

    def read(self) -> Any:
        """The state as a pytree of the Variables' present arrays."""
        return {name: _arrays_in(value) for name, value in self.state.items()}

    def write(self, tree: Any) -> None:
        """Sets the Variables; pytrees are replaced."""
        from flax import nnx

        for name, new in tree.items():
            live = self.state[name]
            if isinstance(live, nnx.Optimizer):
                nnx.update(live.opt_state, nnx.state(new["opt_state"]))
                nnx.update(live, new["rest"])
            elif isinstance(live, nnx.Pytree):
                nnx.update(live, new)
            else:
                self.state[name] = new

    def roots(self) -> Any:
        """The optimizer states, with their Variables."""
        return {name: _optimizer_in(value) for name, value in self.state.items()}

    def trained(self) -> Any:
        """The Variables of each module that the optimizers train."""
        from flax import nnx

        optimizers = [each for each in self.state.values() if isinstance(each, nnx.Optimizer)]
        wrt = optimizers[0].wrt if optimizers else nnx.Param
        return {
            name: _values(nnx.state(each, wrt))
            for name, each in self.state.items()
            if isinstance(each, nnx.Pytree) and not isinstance(each, nnx.Optimizer)
        }


def accessor_for(state: Any) -> StateAccessor:
    """The accessor for a user's state; HealStateError for nnx objects that no mapping names."""
    nnx = sys.modules.get("flax.nnx")  # unless it is imported there are no such objects
    if nnx is None:
        return StateAccessor(state)

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree) and not isinstance(node, (nnx.State, nnx.Variable))

    if isinstance(state, Mapping) and any(map(is_object, state.values())):
        return NnxAccessor(state)
    if any(map(is_object, jax.tree.leaves(state, is_leaf=is_object))):
        raise HealStateError(
            f"this {type(state).__name__} has nnx objects within: map names to them, as in "
            'state={"model": model, "optimizer": optimizer}'
        )
    return StateAccessor(state)


def value(leaf: Any) -> Any:
    """The array of a leaf of `StateAccessor.roots`, which may be an nnx.Variable."""
    return leaf[...] if _is_variable(leaf) else leaf


def _arrays_in(live: Any) -> Any:
    from flax import nnx

    if not isinstance(live, nnx.Pytree):
        return live
    if not isinstance(live, nnx.Optimizer):
        return _values(nnx.state(live))
    # nnx.state would make dictionaries of optax's named tuples.
    flat = nnx.to_flat_state(nnx.state(live))
    rest = [(path, leaf) for path, leaf in flat if path[0] != "opt_state"]
    return {"opt_state": _values(live.opt_state), "rest": _values(nnx.from_flat_state(rest))}


def _optimizer_in(live: Any) -> Any:
    from flax import nnx

    return {"opt_state": live.opt_state} if isinstance(live, nnx.Optimizer) else live


def _values(tree: Any) -> Any:
    return jax.tree.map(value, tree, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)
