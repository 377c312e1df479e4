"""`HealState`: the healing part of an optimizer state, and how it is found in any nesting."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import SequenceKey

from healcore.core import tree
from healcore.core.engine import Engine, EngineState, StateError, neutral
from healcore.core.errors import HealcoreError
from healcore.core.signals import Signals
from healcore.core.verdict import Action, Decision
from healcore.jax import namespace, state_layout
from healcore.jax.compilation import compiled, one_kernel
from healcore.jax.gradients import is_gradient
from healcore.jax.state_layout import StateLayout

Tree = TypeVar("Tree")


class HealStateError(HealcoreError, ValueError):
    """An optimizer state has no healing state, more than one, or one of another policy."""


class HealState(NamedTuple):
    """What `heal`, `heal_zclip` and `protect` carry from step to step, in few arrays.

    Their names are in no other state, so that ``optax.tree.get(opt_state, "count")`` finds the
    optimizer's. No array is empty, because Orbax would refuse to save it.
    """

    heal_floats: chex.Array
    """float32 (n,): the floats of the core's EngineState."""
    heal_ints: chex.Array
    """int32 (m,): a `state_layout.Header`, then the integers and flags of the EngineState."""
    heal_records: chex.Array
    """int32 (rows, elements): the ring buffers of step records, see `state_layout`."""
    heal_decision: dict[str, chex.Array]
    """The decision of the last step: `heal_skip`, `heal_grad_scale`, ..."""
    heal_leaf_norms: chex.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping; zeros while the
    caller passes `grad_norm`. No decision reads it."""


def init(engine: Engine, leaves: int, kept: int = state_layout.STEPS) -> HealState:
    """The state before the first step, for a number of `leaves` with a gradient.

    The host can read the records of `kept` steps, at least those of one dispatch.
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
    engine: Engine, state: HealState, signals: Signals, leaf_norms: chex.Array | None
) -> tuple[HealState, Decision]:
    """One step of the core, with the dtypes of the state kept (weak types would recompile).

    An externally skipped step is skipped in observe mode too. HealStateError as in `engine_state`.
    """
    _check(engine, state)
    leaves, structure = jax.tree.flatten(engine.config)
    numbers = [leaf for leaf in leaves if _is_array(leaf)]  # may be traced
    rest = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    return _step((structure, rest), numbers, state, signals, leaf_norms)


@partial(compiled, static=(0,))
def _step(
    policy: Any,
    numbers: list[Any],
    state: HealState,
    signals: Signals,
    leaf_norms: chex.Array | None,
) -> tuple[HealState, Decision]:
    (structure, rest), given = policy, iter(numbers)
    engine = Engine(structure.unflatten(next(given) if each is None else each for each in rest))
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == jnp.shape(norms):
        norms = leaf_norms
    floats, ints, decision, ordered = one_kernel(partial(_judge, engine), state, signals)
    # Not in the kernel: with `vmap` this is a scatter, which it cannot contain.
    rings = state_layout.write_record(
        state.heal_records,
        state_layout.record(floats, ints),
        state_layout.step(ints),
        state_layout.header(state.heal_ints).orders,
        ordered,
    )
    return HealState(floats, ints, rings, _flat_decision(decision), norms), decision


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _judge(
    engine: Engine, state: HealState, signals: Signals
) -> tuple[chex.Array, chex.Array, Decision, chex.Array]:
    """The new floats and integers, the decision, and whether it has an order for the host."""
    layout = _layout_of(engine, state)
    old = layout.unpack(state.heal_floats, state.heal_ints)
    new, decision = engine.step(old, signals, xp=namespace)
    if signals.externally_skipped is not None:
        # The engine leaves such a skip to its caller, which is this function.
        decision = decision._replace(skip=decision.skip | signals.externally_skipped)
    template = neutral(groups=None if decision.group_scale is None else 1)
    decision = tree.map_leaves(_own, template, decision)
    header = state_layout.header(state.heal_ints)
    # A soft step is done already: it must not push an order of the host out of its ring.
    action = new.last.decision.action
    action = action & ~int(Action.SOFT_STEP) if engine.softens else action
    ordered = (action != 0) & (new.step > old.step)
    if signals.loss is not None:
        header = header._replace(loss_seen=header.loss_seen | jnp.isfinite(signals.loss))
    header = header._replace(orders=header.orders + ordered)
    return *layout.pack(new, header), decision, ordered


def _own(kind: Any, leaf: chex.Array) -> chex.Array:
    """The leaf with the dtype of `kind`, in its own buffer: no buffer can be donated twice.

    Eager code returns one array for several leaves, such as the LR multiplier.
    """
    if isinstance(leaf, Tracer):
        return jnp.asarray(leaf, kind.dtype)
    return jnp.array(leaf, kind.dtype)


def clip_update(
    engine: Engine, state: HealState, norm: chex.Array, skipped: chex.Array
) -> tuple[HealState, chex.Array]:
    """The factor on this step's update, of L2 norm `norm`; see `Engine.clip_update`."""
    layout = _layout_of(engine, state)
    old = layout.unpack(state.heal_floats, state.heal_ints)
    new, factor = engine.clip_update(old, norm, skipped, xp=namespace)
    floats, ints = layout.pack(new, state_layout.header(state.heal_ints))
    return state._replace(heal_floats=floats, heal_ints=ints), factor


def engine_state(engine: Engine, state: HealState) -> EngineState:
    """The core's form of the state; HealStateError if it is of another policy, or no HealState."""
    _check(engine, state)
    floats, ints = state.heal_floats, state.heal_ints
    if not isinstance(ints, Tracer):  # on a device each of some 40 slices would be compiled
        floats, ints = jax.device_get((floats, ints))
    return _layout_of(engine, state).unpack(floats, ints)


def with_engine_state(engine: Engine, state: HealState, new: EngineState) -> HealState:
    """The healing state with the engine's replaced; StateError if `new` is of another model."""
    layout = _layout_of(engine, state)
    old = state_layout.header(state.heal_ints)
    seen = old.loss_seen | (jnp.asarray(new.last.loss) != 0)
    floats, ints = layout.pack(new, old._replace(loss_seen=seen))
    if floats.shape != jnp.shape(state.heal_floats) or ints.shape != jnp.shape(state.heal_ints):
        raise StateError(
            f"the saved state has {floats.shape[0]} numbers and this optimizer's has "
            f"{jnp.shape(state.heal_floats)[0]}: it is of a model with other tensors; start from a "
            "fresh state"
        )
    record, step = state_layout.record(floats, ints), state_layout.step(ints)
    rings = state_layout.write_record(state.heal_records, record, step, old.orders, step != step)
    return state._replace(heal_floats=floats, heal_ints=ints, heal_records=rings)


def with_neutral_decision(state: HealState) -> HealState:
    """The state with the decision that it had before the first step."""
    return state._replace(heal_decision=_flat_decision(neutral(groups=_groups(state))))


def _check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state is of this policy.

    A traced state shows only its shapes; otherwise the fingerprint is compared, too.
    """
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    layout = _layout_of(engine, state)
    found = (jnp.shape(state.heal_floats)[-1:], jnp.shape(state.heal_ints)[-1:])
    if found != ((layout.floats,), (layout.ints,)):
        raise HealStateError(
            f"this healing state is of another policy: it has {found[0]} floats and {found[1]} "
            f"integers, this policy needs {layout.floats} and {layout.ints}. "
            f"{_policies(engine, state)}{_REMEDY}"
        )
    if isinstance(state.heal_ints, Tracer):
        return
    header = state_layout.header(np.asarray(state.heal_ints))
    if (header.schema != state_layout.SCHEMA).any():
        raise HealStateError(
            f"this healing state has layout {header.schema}, this release has "
            f"{state_layout.SCHEMA}: take the healing part of a fresh state, "
            "with_heal_state(without_heal_state(old), like=tx.init(params))"
        )
    own, high, low = layout.header, header.policy_high, header.policy_low
    named = (high | low).any() and (own.policy_high or own.policy_low)  # 0 and 0: no fingerprint
    if named and ((high != own.policy_high) | (low != own.policy_low)).any():
        raise HealStateError(
            "this healing state is of another policy: the policy that made it has other numbers. "
            f"{_policies(engine, state)}{_REMEDY}"
        )


def _policies(engine: Engine, state: HealState) -> str:
    """Sentence with the policies of a state and of an engine, or "" for a traced state."""
    from healcore.policy.loader import name_of  # here: `import healcore.jax` loads no pydantic

    if isinstance(state.heal_ints, Tracer):
        return ""
    made_with = state_layout.fingerprint(state_layout.header(np.asarray(state.heal_ints)))
    names = [name_of(each) for each in (made_with, engine.fingerprint)]
    optimizer, here = (f'"{name}"' if name else "no unchanged preset" for name in names)
    return f"The optimizer was made with {optimizer}, and the policy given here is {here}. "


_REMEDY = (
    "Name one policy everywhere, as in protect(tx, policy) and Healer(policy); for heal_zclip() "
    'write Healer("zclip"). To continue with another policy, let its detectors start again: '
    "with_heal_state(without_heal_state(old), like=tx.init(params))"
)


def no_heal_state_error(state: Any) -> HealStateError:
    """The error for an optimizer state without a healing state where `update` needs one."""
    return HealStateError(
        f"this optimizer state ({type(state).__name__}) is of an optimizer without healcore, or of "
        "another chain: an optimizer made with protect(), heal() or heal_zclip() begins with its "
        "own tx.init(params). To continue from the moments of a bare or clipped optimizer: "
        "opt_state = with_heal_state(old_opt_state, like=tx.init(params))"
    )


def _groups(state: HealState) -> int | None:
    """Number of tensors that the policy clips by themselves, or None."""
    factors = state.heal_decision.get("heal_group_scale")
    return None if factors is None else jnp.shape(factors)[-1]


def _layout_of(engine: Engine, state: HealState) -> StateLayout:
    # Not cached: an engine's numbers may be tracers, which must not be kept.
    return StateLayout(engine, _groups(state) or 0)


def _flat_decision(made: Decision) -> dict[str, chex.Array]:
    return {
        f"heal_{name}": leaf if isinstance(leaf, jax.Array) else jnp.array(leaf, leaf.dtype)
        for name, leaf in made._asdict().items()
        if leaf is not None
    }


# -- in any nesting of states -------------------------------------------------------------------


def find(opt_state: Any) -> HealState:
    """The one HealState in an optimizer state; HealStateError if there is none, or several."""
    found = nodes(HealState, opt_state)
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


def replace(opt_state: Tree, new: HealState) -> Tree:
    """The optimizer state with its HealState replaced; HealStateError unless there is one."""
    find(opt_state)
    return map_nodes(HealState, lambda _: new, opt_state)


def nodes(kind: Any, tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Every node of a class (or of one of a tuple of classes) in a tree, with its path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    return [(path, node) for path, node in found if isinstance(node, kind)]


def map_nodes(kind: Any, fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with every node of a class (or of one of a tuple of classes) replaced by `fn`'s."""
    return jax.tree.map(
        lambda node: fn(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )


def at(root: Any, path: tuple[Any, ...]) -> Any:
    """The node at a path; AttributeError, LookupError or TypeError if there is none."""
    for key in path:
        if hasattr(key, "name"):
            root = getattr(root, key.name)
        else:
            root = root[key.key if hasattr(key, "key") else key.idx]
    return root


def warn_if_after_optimizer(root: Any, path: tuple[Any, ...]) -> None:
    """Warns where the state of an optimizer comes before the healing state at `path` in a chain.

    Only the chain's state shows the order, if the optimizer has a state (SGD without momentum has
    none; in `optax.named_chain` states are not in order). Not an error: it may be intended, or a
    user's own tuple of states.
    """
    index = max((i for i, key in enumerate(path) if isinstance(key, SequenceKey)), default=None)
    if index is None:
        return
    chain = at(root, path[:index])
    # In the state of a chain every member is a tuple, in a tree of parameters not.
    if type(chain) is not tuple or not all(isinstance(member, tuple) for member in chain):
        return
    before = chain[: path[index].idx]
    if nodes(HealState, before):
        return  # a user's tuple of several optimizers' states
    if any(map(is_gradient, jax.tree.leaves(before))):
        warnings.warn(
            "heal, heal_zclip and protect judge gradients, but here an optimizer comes before them "
            "in the chain: they judge its updates, and a NaN is in its moments already. Put the "
            "healing first: optax.chain(heal_zclip(), optax.adamw(1e-3))",
            stacklevel=4,
        )
