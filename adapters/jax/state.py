"""`HealState`: the healing part of an optimizer state, and how it is found in any nesting."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from healcore.core import tree
from healcore.core.engine import Engine, EngineState, StateError, neutral
from healcore.core.errors import HealcoreError
from healcore.core.signals import Signals
from healcore.core.verdict import Decision
from healcore.jax import namespace, records, state_layout
from healcore.jax.chain_order import warn_if_after_optimizer
from healcore.jax.state_layout import StateLayout

_PREFIX = "heal"


class HealStateError(HealcoreError, ValueError):
    """An optimizer state that holds no healing state, more than one, or that of another policy."""


class HealState(NamedTuple):
    """What `heal`, `heal_zclip` and `protect` carry from step to step.

    Few arrays, see `state_layout`. No other state has their names, so that
    ``optax.tree.get(opt_state, "count")`` finds the optimizer's. None is empty, which Orbax would
    refuse to save.
    """

    heal_floats: chex.Array
    """float32 (n,): the core's EngineState, see `engine_state`."""
    heal_ints: chex.Array
    """int32 (m,): its integers and flags; before them the layout's version and the policy's
    fingerprint."""
    heal_records: chex.Array
    """int32 (steps, words): the last steps as the host reads them, see `records`."""
    heal_decision: dict[str, chex.Array]
    """The decision of the last step, as it was enforced: `heal_skip`, `heal_grad_scale`, ..."""
    heal_leaf_norms: chex.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping: evidence of where
    a bad gradient came from. Zeros while the caller passes `grad_norm`. No decision reads it."""


def init(engine: Engine, leaves: int, kept: int = records.STEPS) -> HealState:
    """The state before the first step.

    Args:
        engine: a core Engine.
        leaves: number of tensors with a gradient.
        kept: steps whose records the host can read, at least those of one dispatch.
    """
    layout = StateLayout(engine, leaves if engine.per_tensor else 0)
    floats, ints = layout.pack(layout.template, layout.marks)
    return HealState(
        floats,
        ints,
        records.init(kept, state_layout.record(floats, ints)),
        _decision(neutral(groups=leaves if engine.per_tensor else None)),
        jnp.zeros((leaves,), jnp.float32),
    )


def step(
    engine: Engine, state: HealState, signals: Signals, leaf_norms: chex.Array | None
) -> tuple[HealState, Decision]:
    """One step of the core, with the dtypes of the state kept (weak types would recompile).

    An externally skipped step is skipped in observe mode too, neither learnt nor counted.

    Raises:
        HealStateError: the state is of another policy, or not a HealState. While tracing only
            shapes are compared; its fingerprint is compared where the state is concrete.
    """
    old = engine_state(engine, state)
    new, decision = engine.step(old, signals, xp=namespace)
    if signals.externally_skipped is not None:
        # The engine does not skip such a step, which its caller skips; here this function does.
        decision = decision._replace(skip=decision.skip | signals.externally_skipped)
    template = neutral(groups=None if decision.group_scale is None else 1)
    decision = tree.map_leaves(_own, template, decision)
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == jnp.shape(norms):
        norms = leaf_norms
    marks = state_layout.marks(state.heal_ints)
    ordered = (new.last.decision.action != 0) & (new.step > old.step)
    orders = marks.orders
    if signals.loss is not None:
        marks = marks._replace(loss_seen=marks.loss_seen | jnp.isfinite(signals.loss))
    marks = marks._replace(orders=orders + ordered)
    floats, ints = _layout_of(engine, state).pack(new, marks)
    rings = records.write(
        state.heal_records, state_layout.record(floats, ints), new.step, orders, ordered
    )
    return HealState(floats, ints, rings, _decision(decision), norms), decision


def engine_state(engine: Engine, state: HealState) -> EngineState:
    """The core's own form of the state.

    Raises:
        HealStateError: the state is of another policy, or not a HealState.
    """
    check(engine, state)
    return _layout_of(engine, state).unpack(state.heal_floats, state.heal_ints)


def with_engine_state(engine: Engine, state: HealState, new: EngineState) -> HealState:
    """The healing state with the engine's state replaced; shapes and dtypes stay.

    Raises:
        StateError: `new` is of a model with other tensors.
    """
    layout = _layout_of(engine, state)
    old = state_layout.marks(state.heal_ints)
    seen = old.loss_seen | (jnp.asarray(new.last.loss) != 0)
    floats, ints = layout.pack(new, old._replace(loss_seen=seen))
    if floats.shape != jnp.shape(state.heal_floats) or ints.shape != jnp.shape(state.heal_ints):
        raise StateError(
            f"the saved state has {floats.shape[0]} numbers and this optimizer's has "
            f"{jnp.shape(state.heal_floats)[0]}: it is of a model with other tensors; start from a "
            "fresh state"
        )
    record, step = state_layout.record(floats, ints), state_layout.step(ints)
    rings = records.write(state.heal_records, record, step, old.orders, step != step)
    return state._replace(heal_floats=floats, heal_ints=ints, heal_records=rings)


def check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state is of this policy.

    Shapes always; the fingerprint where it can be read, that is not of a traced state.
    """
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    layout = _layout_of(engine, state)
    found = (jnp.shape(state.heal_floats)[-1:], jnp.shape(state.heal_ints)[-1:])
    if found != ((layout.floats,), (layout.ints,)):
        raise HealStateError(
            f"this healing state is of another policy: it has {found[0]} floats and {found[1]} "
            f"integers, this policy needs {layout.floats} and {layout.ints}. {_REMEDY}"
        )
    if isinstance(state.heal_ints, Tracer):
        return
    marks = [np.asarray(each) for each in state_layout.marks(np.asarray(state.heal_ints))[:3]]
    if (marks[0] != state_layout.SCHEMA).any():
        raise HealStateError(
            f"this healing state has layout {marks[0]}, this release has {state_layout.SCHEMA}: "
            "take the healing part of a fresh state, with_heal_state(without_heal_state(old), "
            "like=tx.init(params))"
        )
    words = layout.marks.policy_high, layout.marks.policy_low
    for word, own in zip(marks[1:], words, strict=True):
        # 0 and 0: one of the two has no fingerprint.
        if any(words) and (marks[1] | marks[2]).any() and (word != own).any():
            raise HealStateError(
                "this healing state is of another policy: its numbers are not those of policy "
                f"{engine.fingerprint}. {_REMEDY}"
            )


_REMEDY = (
    "Name one policy everywhere, as in protect(tx, policy) and Healer(policy); to go on with "
    "another one than the state was made with, let its detectors start again: "
    "with_heal_state(without_heal_state(old), like=tx.init(params))"
)


def no_heal_state_error(state: Any) -> HealStateError:
    """The error for an optimizer state that has no healing state where `update` needs one."""
    return HealStateError(
        f"this optimizer state ({type(state).__name__}) is of an optimizer without healcore, or of "
        "another chain: an optimizer made with protect(), heal() or heal_zclip() begins with its "
        "own tx.init(params). To go on from the moments of a bare or clipped optimizer: "
        "opt_state = with_heal_state(old_opt_state, like=tx.init(params))"
    )


def _layout_of(engine: Engine, state: HealState) -> StateLayout:
    factors = state.heal_decision.get(f"{_PREFIX}_group_scale")
    # Not cached: an engine's numbers may be tracers, which must not be kept.
    return StateLayout(engine, 0 if factors is None else jnp.shape(factors)[-1])


def decision(state: HealState) -> Decision:
    """The decision in a state, in the core's form."""
    found = state.heal_decision
    return Decision(*(found.get(f"{_PREFIX}_{field}") for field in Decision._fields))


def neutral_decision(state: HealState) -> dict[str, chex.Array]:
    """The decision before the first step, in the form of the state's."""
    factors = state.heal_decision.get(f"{_PREFIX}_group_scale")
    return _decision(neutral(groups=None if factors is None else jnp.shape(factors)[-1]))


def _decision(made: Decision) -> dict[str, chex.Array]:
    return {
        f"{_PREFIX}_{name}": leaf if isinstance(leaf, jax.Array) else jnp.array(leaf, leaf.dtype)
        for name, leaf in made._asdict().items()
        if leaf is not None
    }


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
        warn_if_after_optimizer(opt_state, found[0][0])
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
        ".opt_state; for an nnx.Optimizer use healcore.jax.flax_nnx.last_decision)"
    )


def replace(opt_state: Any, new: HealState) -> Any:
    """The optimizer state with its one HealState replaced.

    Raises:
        HealStateError: there is none, or there are several.
    """
    find(opt_state)
    return jax.tree.map(lambda leaf: new if _is_heal(leaf) else leaf, opt_state, is_leaf=_is_heal)


def _own(kind: Any, leaf: chex.Array) -> chex.Array:
    """The leaf with the dtype of `kind`, in a buffer of its own.

    Eager code returns the same array for several leaves (the LR multiplier is in the metrics too),
    and one buffer cannot be donated twice to a compiled step that follows.
    """
    if isinstance(leaf, Tracer):
        return jnp.asarray(leaf, kind.dtype)
    return jnp.array(leaf, kind.dtype)


def _is_heal(node: Any) -> bool:
    return isinstance(node, HealState)
