"""Defines `HealState`, the healing part of an optimizer state, and finds it in nested states."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import SequenceKey

from healcore.core import tree
from healcore.core.engine import Engine, EngineState, StateError, neutral
from healcore.core.errors import HealcoreError
from healcore.core.signals import Signals
from healcore.core.verdict import Decision
from healcore.jax import namespace, state_layout
from healcore.jax.compilation import compiled, standard_promotion
from healcore.jax.gradients import is_gradient
from healcore.jax.state_layout import StateLayout

Tree = TypeVar("Tree")


class HealStateError(HealcoreError, ValueError):
    """Raised if an optimizer state has no healing state, several, or one of another policy."""


class HealState(NamedTuple):
    """The state of `heal`, `heal_zclip` and `protect`, packed in few arrays.

    No other state has fields of these names, so that ``optax.tree.get(opt_state, "count")`` finds
    the optimizer's count. No array is empty, because Orbax cannot save empty arrays.
    """

    heal_floats: jax.Array
    """float32 (n,): the floats of the core's EngineState."""
    heal_ints: jax.Array
    """int32 (m,): a `state_layout.Header`, then the integers and flags of the EngineState."""
    heal_records: jax.Array
    """int32 (rows, elements): the ring buffers of step records, see `state_layout`."""
    heal_decision: dict[str, jax.Array]
    """The decision of the last step: `heal_skip`, `heal_grad_scale`, ..."""
    heal_leaf_norms: jax.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping. Zeros while the
    caller passes `grad_norm`. Negative or -0.0 if the leaf's update was not finite, see
    `gradients.not_finite`. Only for reports: decisions do not depend on it."""


def init(engine: Engine, leaves: int, kept: int = state_layout.STEPS) -> HealState:
    """The state before the first step, for `leaves` tensors with a gradient.

    The ring buffer holds the records of `kept` steps, at least the steps of one dispatch.
    """
    layout = StateLayout(engine, leaves if engine.per_tensor else 0)
    floats, ints = layout.pack(layout.template, layout.header)
    return HealState(
        floats,
        ints,
        state_layout.init_records(kept, state_layout.record(floats, ints)),
        _flat_decision(neutral(groups=leaves if engine.per_tensor else None)),
        jnp.zeros((leaves,), jnp.float32),
    )


def step(
    engine: Engine,
    state: HealState,
    signals: Signals,
    leaf_norms: jax.Array | None,
    bad_update: jax.Array | None = None,
) -> tuple[HealState, Decision]:
    """Judges one step, and keeps the dtypes of the state, because weak types would recompile.

    With `bad_update` (bool, 0-d) the last update was not finite, whatever norm the signals have.
    Skips an externally skipped step in observe mode too. Raises HealStateError like `engine_state`.
    """
    _check(engine, state)
    leaves, structure = jax.tree.flatten(engine.config)
    numbers = [leaf for leaf in leaves if _is_array(leaf)]  # may be traced
    rest = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    return _step((structure, rest), numbers, state, signals, leaf_norms, bad_update)


@partial(compiled, static=(0,))
def _step(
    policy: Any,
    numbers: list[Any],
    state: HealState,
    signals: Signals,
    leaf_norms: jax.Array | None,
    bad_update: jax.Array | None,
) -> tuple[HealState, Decision]:
    (structure, rest), given = policy, iter(numbers)
    engine = Engine(structure.unflatten(next(given) if each is None else each for each in rest))
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == jnp.shape(norms):
        norms = leaf_norms
    floats, ints, decision, row, places = _judge(engine, state, signals, bad_update)
    if signals.externally_skipped is not None:  # keeps the signals of the last judged step
        last = state_layout.last_record(state.heal_records, state_layout.step(state.heal_ints))
        row = jnp.where(signals.externally_skipped, last, row)
    rings = state_layout.write_record(state.heal_records, row, places)
    return HealState(floats, ints, rings, _flat_decision(decision), norms), decision


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _judge(
    engine: Engine, state: HealState, signals: Signals, bad_update: jax.Array | None
) -> tuple[jax.Array, jax.Array, Decision, jax.Array, state_layout.Places]:
    """Returns the new floats and integers, the decision, the record and its places."""
    layout = _layout_of(engine, state)
    if bad_update is not None:
        norm = jnp.where(bad_update, jnp.inf, signals.update_norm)
        signals = signals._replace(update_norm=norm)
    old = layout.unpack(state.heal_floats, state.heal_ints)
    new, decision = engine.step(old, signals, xp=namespace)
    if signals.externally_skipped is not None:
        # The engine does not include an external skip in its decision.
        decision = decision._replace(skip=decision.skip | signals.externally_skipped)
    template = neutral(groups=None if decision.group_scale is None else 1)
    decision = tree.map_leaves(_as_own_buffer, template, decision)
    header = state_layout.header(state.heal_ints)
    ordered = (new.last.decision.action != 0) & (new.step > old.step)
    if signals.loss is not None:
        header = header._replace(loss_seen=header.loss_seen | jnp.isfinite(signals.loss))
    places = state_layout.places(state.heal_records, new.step, header.orders, ordered)
    header = header._replace(orders=header.orders + ordered)
    floats, ints = layout.pack(new, header)
    bad = _reports_bad_update(signals)
    return floats, ints, decision, state_layout.record(floats, ints, bad), places


def _reports_bad_update(signals: Signals) -> Any:
    """Whether only the previous update, and not this gradient, is not finite."""
    if signals.update_norm is None:
        return False
    bad = ~jnp.isfinite(signals.update_norm)
    return bad if signals.grad_norm is None else bad & jnp.isfinite(signals.grad_norm)


def _as_own_buffer(kind: Any, leaf: jax.Array) -> jax.Array:
    """Returns the leaf with the dtype of `kind`, in a separate buffer.

    Eager code may return the same array for several leaves, but a buffer can be donated only once.
    """
    if isinstance(leaf, Tracer):
        return jnp.asarray(leaf, kind.dtype)
    return jnp.array(leaf, kind.dtype)


def engine_state(engine: Engine, state: HealState) -> EngineState:
    """Unpacks the EngineState.

    Raises HealStateError for another policy or another type.
    """
    _check(engine, state)
    floats, ints = state.heal_floats, state.heal_ints
    if not isinstance(ints, Tracer):  # avoids compiling about 40 slices for the device
        floats, ints = jax.device_get((floats, ints))
    return _layout_of(engine, state).unpack(floats, ints)


@standard_promotion
def with_engine_state(engine: Engine, state: HealState, new: EngineState) -> HealState:
    """Replaces the EngineState. StateError if `new` belongs to another model."""
    layout = _layout_of(engine, state)
    old = state_layout.header(state.heal_ints)
    seen = old.loss_seen | (jnp.asarray(new.last.loss) != 0)
    floats, ints = layout.pack(new, old._replace(loss_seen=seen))
    if floats.shape != jnp.shape(state.heal_floats) or ints.shape != jnp.shape(state.heal_ints):
        raise StateError(
            f"the saved state has {floats.shape[0]} numbers, and this optimizer's state has "
            f"{jnp.shape(state.heal_floats)[0]}: it belongs to a model with other tensors; start "
            "from a fresh state"
        )
    step = state_layout.step(ints)
    record = state_layout.record(floats, ints)
    places = state_layout.places(state.heal_records, step, old.orders, step != step)
    rings = state_layout.write_record(state.heal_records, record, places)
    return state._replace(heal_floats=floats, heal_ints=ints, heal_records=rings)


def with_neutral_decision(state: HealState) -> HealState:
    """Replaces the last decision by the neutral decision, as before the first step."""
    return state._replace(heal_decision=_flat_decision(neutral(groups=_groups(state))))


def _check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state belongs to this policy.

    Compares the shapes, and the fingerprint unless the state is traced.
    """
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    layout = _layout_of(engine, state)
    found = (jnp.shape(state.heal_floats)[-1:], jnp.shape(state.heal_ints)[-1:])
    if found != ((layout.floats,), (layout.ints,)):
        raise HealStateError(
            f"this healing state belongs to another policy: it has {found[0]} floats and {found[1]}"
            f" integers, and this policy needs {layout.floats} and {layout.ints}. "
            f"{_policies(engine, state)}{_REMEDY}"
        )
    if isinstance(state.heal_ints, Tracer):
        return
    header = state_layout.header(np.asarray(state.heal_ints))
    if (header.schema != state_layout.SCHEMA).any():
        raise HealStateError(
            f"this healing state has layout {header.schema}, and this release has layout "
            f"{state_layout.SCHEMA}: use the healing part of a fresh state, "
            "with_heal_state(without_heal_state(old), like=tx.init(params))"
        )
    own, high, low = layout.header, header.policy_high, header.policy_low
    named = (high | low).any() and (own.policy_high or own.policy_low)  # 0 and 0: no fingerprint
    if named and ((high != own.policy_high) | (low != own.policy_low)).any():
        raise HealStateError(
            "this healing state belongs to another policy, whose numbers differ. "
            f"{_policies(engine, state)}{_REMEDY}"
        )


def _policies(engine: Engine, state: HealState) -> str:
    """A sentence that names both policies, or an empty string for a traced state."""
    from healcore.policy.loader import name_of  # here, so `import healcore.jax` skips pydantic

    if isinstance(state.heal_ints, Tracer):
        return ""
    made_with = state_layout.fingerprint(state_layout.header(np.asarray(state.heal_ints)))
    names = [name_of(each) for each in (made_with, engine.fingerprint)]
    optimizer, here = (f'"{name}"' if name else "not an unchanged preset" for name in names)
    return f"The optimizer's policy is {optimizer}, and the policy passed here is {here}. "


_REMEDY = (
    "Use the same policy everywhere, as in protect(tx, policy) and Healer(policy); for "
    'heal_zclip() write Healer("zclip"). To continue with another policy and reset its detectors: '
    "with_heal_state(without_heal_state(old), like=tx.init(params))"
)


def no_heal_state_error(state: Any) -> HealStateError:
    """The error for an optimizer state without a healing state where `update` needs one."""
    return HealStateError(
        f"this optimizer state ({type(state).__name__}) belongs to an optimizer without healcore, "
        "or to another chain: an optimizer with protect(), heal() or heal_zclip() starts with its "
        "own tx.init(params). To continue from the moments of a bare or clipped optimizer: "
        "opt_state = with_heal_state(old_opt_state, like=tx.init(params))"
    )


def _groups(state: HealState) -> int | None:
    """Number of tensors that a per-tensor policy clips, or None for any other policy."""
    factors = state.heal_decision.get("heal_group_scale")
    return None if factors is None else jnp.shape(factors)[-1]


def _layout_of(engine: Engine, state: HealState) -> StateLayout:
    # Not cached, because an engine's numbers may be tracers, which must not outlive their trace.
    return StateLayout(engine, _groups(state) or 0)


def _flat_decision(made: Decision) -> dict[str, jax.Array]:
    return {
        f"heal_{name}": leaf if isinstance(leaf, jax.Array) else jnp.array(leaf, leaf.dtype)
        for name, leaf in made._asdict().items()
        if leaf is not None
    }


# -- nested states ------------------------------------------------------------------------------


def find(opt_state: Any) -> HealState:
    """The HealState in an optimizer state. Raises HealStateError unless exactly one exists."""
    found = nodes(HealState, opt_state)
    if len(found) == 1:
        warn_if_after_optimizer(opt_state, found[0][0])
        return found[0][1]
    if found:
        places = ", ".join(f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found)
        raise HealStateError(
            f"this optimizer state contains {len(found)} healing states, at {places}: "
            "pass a part with only one of them"
        )
    raise HealStateError(
        f"no healing state in this {type(opt_state).__name__}: pass the opt_state of a "
        "transformation that contains heal(), heal_zclip() or protect() (a TrainState has it at "
        ".opt_state; for an nnx.Optimizer use healcore.jax.flax_nnx.last_decision)"
    )


def replace(opt_state: Tree, new: HealState) -> Tree:
    """Replaces the HealState in an optimizer state. Raises HealStateError like `find`."""
    find(opt_state)
    return map_nodes(HealState, lambda _: new, opt_state)


def nodes(kind: Any, tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The path and node of every instance of `kind`, a class or tuple of classes, in a tree."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    return [(path, node) for path, node in found if isinstance(node, kind)]


def map_nodes(kind: Any, fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Replaces every instance of `kind`, a class or tuple of classes, by the result of `fn`."""
    return jax.tree.map(
        lambda node: fn(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )


def at(root: Any, path: tuple[Any, ...]) -> Any:
    """The node at a path. Raises AttributeError, LookupError or TypeError if it does not exist."""
    for key in path:
        if hasattr(key, "name"):
            root = getattr(root, key.name)
        else:
            root = root[key.key if hasattr(key, "key") else key.idx]
    return root


def warn_if_after_optimizer(root: Any, path: tuple[Any, ...]) -> None:
    """Warns if an optimizer's state precedes the healing state at `path` in a chain.

    Detects only optimizers with a state (SGD without momentum has no state), and not in
    `optax.named_chain`, whose states are unordered. This is not an error, because the order may be
    intended, or the tuple may be a user's own.
    """
    index = max((i for i, key in enumerate(path) if isinstance(key, SequenceKey)), default=None)
    if index is None:
        return
    chain = at(root, path[:index])
    # Every member of a chain's state is a tuple, unlike the members of a tree of parameters.
    if type(chain) is not tuple or not all(isinstance(member, tuple) for member in chain):
        return
    before = chain[: path[index].idx]
    if len(path) == index + 1:  # `heal` or `heal_zclip` itself, not a part of `protect`
        _warn_if_value_is_read(chain[path[index].idx + 1 :])
    if nodes(HealState, before):
        return  # a user's tuple with the states of several optimizers
    if any(map(is_gradient, jax.tree.leaves(before))):
        warnings.warn(
            "heal, heal_zclip and protect have to judge gradients, but an optimizer precedes them "
            "in this chain: they judge its updates, after a NaN has reached its moments. Put "
            "healing first: optax.chain(heal_zclip(), optax.adamw(1e-3))",
            stacklevel=4,
        )


def _warn_if_value_is_read(after: tuple[Any, ...]) -> None:
    names = ("MomoState", "MomoAdamState", "ReduceLROnPlateauState")
    stops = (*names, "ApplyIfFiniteState")  # which does not apply an update of NaN
    found = jax.tree.leaves(after, is_leaf=lambda node: type(node).__name__ in stops)
    if any(type(node).__name__ in names for node in found):
        warnings.warn(
            "an optimizer after heal or heal_zclip in this chain reads value=, and a NaN loss "
            "reaches it although the step is skipped: write protect(optimizer) instead",
            stacklevel=5,
        )
