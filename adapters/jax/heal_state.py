"""Defines `HealState`, the healing part of an optimizer state, and finds it in nested states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.tree_util import FlattenedIndexKey, SequenceKey, default_registry

from healcore.console import first_of
from healcore.core import numerics
from healcore.core.decision import RECORD_FIELDS, RECORD_INTS, Decision, record_metrics
from healcore.core.engine import Engine, EngineState, StateError, Tally, neutral
from healcore.core.engine.state import EngineConfig, config_differences, record_numbers
from healcore.core.errors import HealcoreError
from healcore.core.signals import Signals
from healcore.jax import namespace
from healcore.jax.gradients import compiled, is_gradient
from healcore.policy.loader import engine_of, name_of

Tree = TypeVar("Tree")

RECORDS = 64
"""Default number of rows of `HealState.heal_records`."""
_FLOATS = len(RECORD_FIELDS)  # end of the float32 numbers in a row
EDIT, _LOSS_SEEN, _STEP, _CHANGE_EXPECTED = range(2, 6)
"""Indices in `HealState.heal_engine`. The first two numbers are `Engine.fingerprint`, or 0 for a
policy of arrays. `_STEP` and `_CHANGE_EXPECTED` are the first leaves of the EngineState."""


class HealStateError(HealcoreError, ValueError):
    """An optimizer state has no healing state, several, or one of another policy."""


class HealState(NamedTuple):
    """The state of `heal`, `heal_zclip` and `protect`.

    No other state has fields of these names, so that ``optax.tree.get(opt_state, "count")`` finds
    the optimizer's count. No array is empty, because Orbax cannot save empty arrays.
    """

    heal_engine: jax.Array
    """int32 (m,): fingerprint of the policy, number of the Healer's last edit, whether a loss was
    finite, then the leaves of the core's EngineState, floats by their bits. One array, because each
    array costs a jitted step about 1 us (2 CPU cores)."""
    heal_records: jax.Array
    """int32 (records, n): ring of the last steps, see `_row_places`. Row (i - 1) % records is of
    step i. A dispatch (`lax.scan` over steps) has at most as many steps."""
    heal_decision: dict[str, jax.Array]
    """The decision of the last step: `heal_skip`, `heal_grad_scale`, ... Separate arrays, because
    XLA would compute the numbers in a vector again in the kernel of each tensor."""
    heal_leaf_norms: jax.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping. Zeros while the
    caller passes `grad_norm`. Only for reports: decisions do not depend on it."""
    heal_numbers: Any = None
    """float32 (6, n): ranges of the `optax.inject_hyperparams` numbers in the optimizer of
    `protect`, and the ranges in which the Healer holds them; see `optimizer_numbers`. None if the
    optimizer has no such number."""


class ScaleByHealLrState(NamedTuple):
    """The state of `scale_by_heal_lr`. No other state in a chain has a field of this name."""

    heal_lr_scale: jax.Array
    """The learning-rate multiplier, float32 0-d in (0, 1]."""


_NO_FINGERPRINT = "0" * 16
"""Of a policy whose numbers are arrays."""

_policies: dict[str, EngineConfig] = {}
"""Fingerprint -> policy, of each state that this process has made. A state holds the fingerprint
only, and the error for a wrong policy names what differs."""


def init(engine: Engine, leaves: int, records: int) -> HealState:
    """The state before the first step, for `leaves` tensors with a gradient."""
    if engine.fingerprint is not None:
        _policies[engine.fingerprint] = engine.config
    groups = leaves if engine.per_tensor else None
    first = engine.init(groups=groups or 0)
    halves = np.frombuffer(bytes.fromhex(engine.fingerprint or _NO_FINGERPRINT), ">i4").astype(
        np.int32
    )
    head = [halves, np.zeros(2, np.int32)]
    vector = np.concatenate([*map(_bits, [*head, *jax.tree.leaves(first)])])
    return HealState(
        jnp.asarray(vector),
        jnp.tile(vector[_row_places(first)], (records, 1)),
        _flat_decision(neutral(groups=groups)),
        jnp.zeros((leaves,), jnp.float32),
    )


def step(
    engine: Engine, state: HealState, signals: Signals, leaf_norms: jax.Array | None
) -> tuple[HealState, Decision]:
    """Judges one step, and keeps the dtypes of the state, because weak types would recompile.

    Skips an externally skipped step in observe mode too. Raises HealStateError like `engine_state`.
    """
    _check(engine, state)
    leaves, structure = jax.tree.flatten(engine.config)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]  # maybe traced
    rest = tuple(None if isinstance(x, jax.Array | np.ndarray) else x for x in leaves)
    policy = structure, rest, engine.limits_norm
    return _step(policy, arrays, state, signals, leaf_norms)


@partial(compiled, static=(0,))
def _step(
    policy: Any, arrays: list[Any], state: HealState, signals: Signals, leaf_norms: jax.Array | None
) -> tuple[HealState, Decision]:
    """Judges one step. `policy` is the hashable part of the engine, and `arrays` the others."""
    (structure, rest, limits_norm), left = policy, iter(arrays)
    config = structure.unflatten(next(left) if part is None else part for part in rest)
    engine = Engine(config, limits_norm=limits_norm)
    old = _unpack(engine, state)
    new, decision = engine.step(old, signals, xp=namespace)
    before = _flat_decision(old.last.decision)
    # Leaves that every step returns unchanged, because the policy never gives this order.
    unchanged = {n for n, leaf in _flat_decision(decision).items() if leaf is before.get(n)}
    if signals.externally_skipped is not None:
        # The engine does not include an external skip in its decision.
        decision = decision._replace(skip=decision.skip | signals.externally_skipped)
    template = neutral(groups=None if decision.group_scale is None else 1)
    decision = numerics.map_leaves(
        lambda kind, leaf: jnp.asarray(leaf, kind.dtype), template, decision
    )
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == norms.shape:
        norms = leaf_norms
    last = [*state.heal_engine[:_STEP], *jax.tree.leaves(old)]
    numbers = [*last[:_STEP], *jax.tree.leaves(new)]
    if signals.loss is not None:
        numbers[_LOSS_SEEN] |= jnp.isfinite(signals.loss)
    place = (new.step - 1) % len(state.heal_records)
    vector = _repack(state.heal_engine, last, numbers)
    row = vector.at[_row_places(new)].get(mode="promise_in_bounds")
    return HealState(
        vector,
        lax.dynamic_update_index_in_dim(state.heal_records, row, place, 0),
        _flat_decision(decision) | {name: state.heal_decision[name] for name in unchanged},
        norms,
    ), decision


def engine_state(engine: Engine, state: HealState) -> EngineState:
    """Unpacks the EngineState, as NumPy arrays unless the state is traced.

    Raises HealStateError for another policy or another type.
    """
    _check(engine, state)
    if not isinstance(state.heal_engine, Tracer):  # avoids one dispatch per leaf
        state = state._replace(heal_engine=jax.device_get(state.heal_engine))
    return _unpack(engine, state)


def has_norm_limit(engine: Engine, state: HealState) -> Any:
    """Whether a rollback has limited the gradient norm: a bool, 0-d, traced if the state is."""
    return _unpack(engine, state).norm_limit != 0


def with_engine_state(state: HealState, new: EngineState) -> HealState:
    """Replaces the EngineState by NumPy arrays, outside of `jit`, and resets the last decision.

    Raises StateError if `new` belongs to another model.
    """
    head = np.zeros(_LOSS_SEEN, np.int32)
    seen = new.last.loss != 0
    vector = np.concatenate([*map(_bits, [head, seen, *jax.tree.leaves(new)])])
    live, records = state.heal_engine, state.heal_records
    if vector.shape != jnp.shape(live):
        raise StateError(
            f"the saved state has {vector.size} numbers, and this optimizer's state has "
            f"{live.size}: it belongs to a model with other tensors; start from a fresh state"
        )
    is_head = np.arange(vector.size) < _STEP  # not of the EngineState
    here = np.arange(len(records)) == (new.step - 1) % len(records)
    return state._replace(
        heal_engine=jnp.where(is_head, live | vector, vector),
        heal_records=jnp.where(here[:, None], vector[_row_places(new)], records),
        heal_decision=_flat_decision(neutral(groups=_groups(state))),
    )


def with_change_expected(state: HealState) -> HealState:
    """Opens the engine's grace window at the next step."""
    return _with_number(state, _CHANGE_EXPECTED, 1)


def with_edit(state: HealState, number: int) -> HealState:
    """Sets the number of the Healer's last edit of the state.

    A step keeps the number, so a state computed from an older state has an older number.
    """
    return _with_number(state, EDIT, number)


def _with_number(state: HealState, index: int, number: int) -> HealState:
    # An indexed update fails outside of jit on a mesh of several processes.
    vector = state.heal_engine
    here = np.arange(vector.shape[-1]) == index
    return state._replace(heal_engine=jnp.where(here, np.int32(number), vector))


def steps_judged(vector: Any) -> Any:
    """The number of steps that the engine has judged, in a `HealState.heal_engine`."""
    return vector[_STEP]


# -- packing ------------------------------------------------------------------------------------


def _repack(vector: jax.Array, last: Sequence[Any], numbers: Sequence[Any]) -> jax.Array:
    """Replaces the `last` numbers of a vector; a number that is the same object is not written.

    XLA compiles a concatenation as one kernel per number, and a chain of selects as one kernel,
    which takes half of the time to compile the step of a small model.
    """
    start = 0
    index = lax.iota(np.int32, vector.size)
    for old, new in zip(last, numbers, strict=True):
        if new is not old and new.size == 1:
            vector = namespace.where(index == start, _bits(new), vector)
        elif new is not old:
            vector = lax.dynamic_update_slice(vector, _bits(new), (start,))
        start += new.size
    return vector


def _bits(number: Any) -> Any:
    """A number or an array as an int32 vector."""
    is_float = jnp.issubdtype(number.dtype, jnp.floating)
    bits = number.astype(np.float32).view(np.int32) if is_float else number.astype(np.int32)
    return bits.reshape(-1)


def _unpack(engine: Engine, state: HealState) -> EngineState:
    vector = state.heal_engine
    start = _STEP
    values = []
    leaves, structure = jax.tree.flatten(engine.init(groups=_groups(state) or 0))
    for like in leaves:
        part = vector[start : start + like.size].reshape(like.shape)
        values.append(_value(part, like.dtype))
        start += like.size
    return structure.unflatten(values)


def _value(bits: Any, dtype: Any) -> Any:
    if dtype == np.bool_:
        return bits != 0
    return bits.view(np.float32) if dtype == np.float32 else bits


@jax.jit
def metrics(vector: jax.Array, records: jax.Array) -> dict[str, jax.Array]:
    """The numbers of the newest step, named for a logger by `record_metrics`.

    The loss is NaN until the first finite loss. (The engine's state has 0 there, because a
    checkpoint with a NaN would count as bad.) One dispatch outside of a compiled step.
    """
    if vector.ndim > 1:  # several runs, of `vmap`
        return jax.vmap(metrics)(vector, records)
    newest = (steps_judged(vector) - 1) % records.shape[0]
    row = lax.dynamic_index_in_dim(records, newest, keepdims=False)
    names = (*RECORD_FIELDS, *Tally._fields)
    kinds = dict.fromkeys(names[RECORD_INTS:_FLOATS], np.float32) | {"skip": np.bool_}
    values = {name: _value(row[i], kinds.get(name)) for i, name in enumerate(names)}
    values["loss"] = jnp.where(vector[_LOSS_SEEN] != 0, values["loss"], jnp.nan)
    return record_metrics(values)


def _row_places(state: EngineState) -> np.ndarray:
    """Indices in `HealState.heal_engine` of a row: `RECORD_FIELDS`, then the `Tally`."""
    leaves, structure = jax.tree.flatten(state)
    places = structure.unflatten(np.cumsum([_STEP, *(leaf.size for leaf in leaves)])[:-1])
    return np.array((*record_numbers(places), *places.tally), np.int32)


# -- the policy of a state ----------------------------------------------------------------------


def _check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state belongs to this policy.

    Compares the shapes, and the fingerprint unless the state is traced.
    """
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    leaves = jax.tree.leaves(engine.init(groups=_groups(state) or 0))
    needed, given = _STEP + sum(leaf.size for leaf in leaves), jnp.shape(state.heal_engine)[-1]
    made_with = None  # unknown within `jit`
    if not isinstance(state.heal_engine, Tracer):
        made_with = np.asarray(state.heal_engine)[..., :EDIT].astype(">i4").tobytes().hex()[:16]
    known = made_with not in (None, _NO_FINGERPRINT) and engine.fingerprint is not None
    if given != needed or (known and made_with != engine.fingerprint):
        raise HealStateError(
            "this healing state belongs to another policy or release: "
            f"{_difference(made_with, engine)}. "
            "Use the same policy everywhere, as in protect(tx, policy) and Healer(policy); for "
            'heal_zclip() write Healer("zclip"). To continue with another policy and reset its '
            "detectors: with_heal_state(without_heal_state(old), like=tx.init(params))"
        )


def _difference(made_with: str | None, engine: Engine) -> str:
    """What differs between the policy of a state, by its fingerprint, and the engine's policy."""
    here = _policy_text(engine.fingerprint)
    if made_with == engine.fingerprint:
        return f"its policy has the same numbers as the one passed here, {here}"
    theirs = _policies.get(made_with or "")
    name = name_of(made_with)
    if theirs is None and name is not None:
        theirs = engine_of(name).config
    text = f"the policy that made it is {_policy_text(made_with)}, the policy passed here is {here}"
    differences = [] if theirs is None else config_differences(theirs, engine.config)
    return f"{text}; they differ in {first_of(differences, 5, '; ')}" if differences else text


def _policy_text(fingerprint: str | None) -> str:
    """The name of a preset, or what else is known of a policy."""
    if fingerprint in (None, _NO_FINGERPRINT):
        return "an unknown one"
    name = name_of(fingerprint)
    return f'"{name}"' if name else f"your own or a changed one (fingerprint {fingerprint[:8]})"


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


Kind = type | tuple[type, ...] | Callable[[Any], bool]
"""A class, a tuple of classes, or a predicate of nodes."""


def nodes(kind: Kind, tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The path and node of every node of a kind in a tree."""
    matches = _matching(kind)
    nodes_and_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches)
    return [(path, node) for path, node in nodes_and_paths if matches(node)]


def map_nodes(kind: Kind, fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Replaces every node of a kind by the result of `fn`."""
    matches = _matching(kind)
    return jax.tree.map(lambda node: fn(node) if matches(node) else node, tree, is_leaf=matches)


def _matching(kind: Any) -> Callable[[Any], bool]:
    if isinstance(kind, type | tuple):
        return lambda node: isinstance(node, kind)
    return kind


def node_at(root: Any, path: tuple[Any, ...]) -> Any:
    """The node at a path. Raises AttributeError, LookupError or TypeError if it does not exist."""
    for key in path:
        if isinstance(key, FlattenedIndexKey):  # a class registered without keys
            root = default_registry.flatten_one_level(root)[0][key.key]
        elif hasattr(key, "name"):
            root = getattr(root, key.name)
        else:
            root = root[key.key if hasattr(key, "key") else key.idx]
    return root


def is_optax_state(node: Any) -> bool:
    """Whether a node is the state of a transformation of optax."""
    kind = type(node)
    return kind.__module__.startswith("optax.") and kind is not optax.LookaheadParams


def warn_if_after_optimizer(root: Any, path: tuple[Any, ...]) -> None:
    """Warns if an optimizer's state precedes the healing state at `path` in a chain.

    Detects only optimizers with a state (SGD without momentum has no state), and not in
    `optax.named_chain`, whose states are unordered. This is not an error, because the order may be
    intended, or the tuple may be a user's own.
    """
    index = max((i for i, key in enumerate(path) if isinstance(key, SequenceKey)), default=None)
    if index is None:
        return
    chain = node_at(root, path[:index])
    # Every member of a chain's state is a tuple, unlike the members of a tree of parameters.
    if type(chain) is not tuple or not all(isinstance(member, tuple) for member in chain):
        return
    before = chain[: path[index].idx]
    if nodes(HealState, before):
        return  # a user's tuple with the states of several optimizers
    states = [state for _, state in nodes(is_optax_state, before)]
    if any(map(is_gradient, jax.tree.leaves(states))):
        warnings.warn(
            "heal, heal_zclip and protect have to judge gradients, but an optimizer precedes them "
            "in this chain: they judge its updates, after a NaN has reached its moments. Put "
            "healing first: optax.chain(heal_zclip(), optax.adamw(1e-3))",
            stacklevel=4,
        )
