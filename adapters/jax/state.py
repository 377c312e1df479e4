"""The healing part of an optimizer state, and finding it again inside any nesting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.core import Tracer

from healcore.core import tree
from healcore.core.engine import Engine, EngineState, neutral
from healcore.core.signals import Signals
from healcore.core.verdict import Decision
from healcore.jax.placement import warn_if_behind

_PREFIX = "heal"


class HealStateError(ValueError):
    """An optimizer state that holds no healing state, or more than one."""


class HealState(NamedTuple):
    """What `heal`, `heal_zclip` and `protect` carry from step to step. Scalars mostly.

    Flat dictionaries with names that nothing else has, and not the core's nested NamedTuples:
    those have fields named `count`, `step` and `scale`, so that ``optax.tree.get(opt_state,
    "count")`` would find two, and arrays of no elements, which Orbax refuses to save.
    """

    heal_state: dict[str, chex.Array]
    """The core's EngineState: `heal_step`, `heal_clip_mean`, `heal_tally_skips`, ..."""
    heal_decision: dict[str, chex.Array]
    """The decision of the last step, as it was enforced: `heal_skip`, `heal_grad_scale`, ..."""
    heal_leaf_norms: chex.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping, which says where
    a bad gradient came from. Zeros while the caller passes `grad_norm`. No decision reads it."""


def init(engine: Engine, leaves: int) -> HealState:
    """The state before the first step.

    Args:
        engine: a core Engine.
        leaves: number of tensors with a gradient.
    """
    groups = leaves if engine.per_tensor else 0
    decision = neutral(groups=groups if engine.per_tensor else None)
    norms = jnp.zeros((leaves,), jnp.float32)
    return HealState(pack(engine.init(groups=groups)), pack(decision), norms)


def step(
    engine: Engine, state: HealState, signals: Signals, leaf_norms: chex.Array | None
) -> tuple[HealState, Decision]:
    """One step of the core, with the dtypes of the state kept (weak types would recompile).

    A voided step is skipped, in observe mode too, and neither learnt nor counted.
    """
    old = engine_state(engine, state)
    new, decision = engine.step(old, signals, xp=jnp)
    if signals.void is not None:
        # The engine leaves a voided step to whoever voids it; here that has to be this step.
        decision = decision._replace(skip=decision.skip | signals.void)
    template = neutral(groups=None if decision.group_scale is None else 1)
    new = tree.map_leaves(_own, old, new)
    decision = tree.map_leaves(_own, template, decision)
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == jnp.shape(norms):
        norms = leaf_norms
    return HealState(pack(new), pack(decision), norms), decision


def engine_state(engine: Engine, state: HealState) -> EngineState:
    """The core's own form of the state.

    Raises:
        HealStateError: the state is of another policy.
    """
    factors = state.heal_decision.get(f"{_PREFIX}_group_scale")
    template = engine.init(groups=0 if factors is None else jnp.shape(factors)[-1])
    return unpack(template, state.heal_state)


def decision(state: HealState) -> Decision:
    """The decision in a state, in the core's form."""
    found = state.heal_decision
    return Decision(*(found.get(f"{_PREFIX}_{field}") for field in Decision._fields))


def pack(nested: Any) -> dict[str, chex.Array]:
    """A nested state of arrays as one flat dictionary, without its arrays of no elements."""
    flat: dict[str, chex.Array] = {
        name: leaf if isinstance(leaf, jax.Array) else jnp.array(leaf, leaf.dtype)
        for name, leaf in _named(nested, _PREFIX)
        if leaf.size
    }
    assert len(flat) == sum(1 for leaf in tree.leaves(nested) if leaf.size), "two leaves, one name"
    return flat


def unpack(template: Any, flat: Mapping[str, chex.Array]) -> Any:
    """What `pack` was given, in the structure of `template` (NumPy arrays).

    Raises:
        HealStateError: the names are not those of the template.
    """
    names = [name for name, leaf in _named(template, _PREFIX) if leaf.size]
    if set(names) != set(flat):
        odd = sorted(set(names) ^ set(flat))
        raise HealStateError(
            f"this healing state is of another policy, they differ in {', '.join(odd[:3])}"
            f"{', ...' if len(odd) > 3 else ''}: pass the policy that the optimizer was built with"
        )
    leaves = iter([flat[name] for name in names])
    return tree.map_leaves(lambda leaf: next(leaves) if leaf.size else jnp.asarray(leaf), template)


def find(opt_state: Any) -> HealState:
    """The one HealState anywhere inside an optimizer state.

    Args:
        opt_state: what ``tx.init`` or ``tx.update`` returned, chained, wrapped or masked.

    Raises:
        HealStateError: there is none, or there are several.
    """
    found = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_heal)
        if _is_heal(leaf)
    ]
    if len(found) == 1:
        warn_if_behind(opt_state, found[0][0])
        return found[0][1]
    if found:
        places = ", ".join(f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found)
        raise HealStateError(
            f"this optimizer state holds {len(found)} healing states, at {places}: "
            "pass the part that holds the one you mean"
        )
    raise HealStateError(
        f"no healing state in this {type(opt_state).__name__}: pass the opt_state of a "
        "transformation that contains heal(), heal_zclip() or protect() (a TrainState has it at "
        ".opt_state; for an nnx.Optimizer use healcore.jax.flax_nnx.decision_of)"
    )


def replace(opt_state: Any, new: HealState) -> Any:
    """The optimizer state with its one HealState replaced.

    Raises:
        HealStateError: there is none, or there are several.
    """
    find(opt_state)
    return jax.tree.map(lambda leaf: new if _is_heal(leaf) else leaf, opt_state, is_leaf=_is_heal)


def _own(kind: Any, leaf: chex.Array) -> chex.Array:
    """The leaf with the dtype of `kind`, in a buffer that no other leaf has.

    Eager code returns the same array in several places (the LR multiplier is in the telemetry,
    too), and the same buffer cannot be donated twice to a compiled step that follows.
    """
    if isinstance(leaf, Tracer):
        return jnp.asarray(leaf, kind.dtype)
    return jnp.array(leaf, kind.dtype)


def _named(nested: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every array with the path to it, in the order of `tree.leaves`."""
    if nested is None:
        return
    if isinstance(nested, tuple):
        names = getattr(nested, "_fields", range(len(nested)))
        for name, part in zip(names, nested, strict=True):
            yield from _named(part, f"{prefix}_{name}")
    else:
        yield prefix, nested


def _is_heal(node: Any) -> bool:
    return isinstance(node, HealState)
