"""`HealState`: the healing part of an optimizer state, and what a step does with it.

The engine works on an `EngineState`, a tree of some eighty numbers. Each array of an optimizer
state costs a jitted step 2 to 5 us, and the whole step of a small model takes 100. So the numbers
stand in one array, in the order in which JAX flattens the tree, floats by their bits:

    HealState --unpack--> EngineState --Engine.step--> EngineState --pack--> HealState
                                   ^                |
                           Signals of the step      Decision, which the transformation enforces

All of this is traced into the user's step (`step`). Outside of it, the Healer and the public
functions of `healcore.jax` read and replace the state. A HealState carries no policy, only the
policy's fingerprint. So a function that needs the whole `EngineState` takes the engine, and checks
that the state belongs to it. What every policy has comes first in the array, and is read without.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from healcore.core.decision import Decision
from healcore.core.engine import Engine, EngineConfig, EngineState, StateError, neutral
from healcore.core.engine.state import record_numbers
from healcore.core.errors import HealcoreError, exported_by
from healcore.core.signals import Signals
from healcore.core.step_record import RECORD_FIELDS, record_metrics
from healcore.core.trees import map_leaves
from healcore.jax.array_namespace import JAX
from healcore.jax.compilation import compiles_one_kernel, in_one_kernel
from healcore.jax.trees import PyTree, is_array
from healcore.policy.loader import name_of

DEFAULT_RECORDS = 64
"""Default number of steps whose records a HealState has."""


@exported_by("healcore.jax")
class HealStateError(HealcoreError, ValueError):
    """An optimizer state has no healing state, several, or one of another policy.

    The usual reasons are an optimizer that was made without healcore, a policy of `Healer` that
    differs from the policy of `protect`, and a step that returned a part of its state. The message
    says which, and what to write instead.
    """

    differences: str = ""
    """What differs between a new state and the first state, for the run's line about a changed
    model. Empty if something else is wrong."""


class HealState(NamedTuple):
    """The state of `heal`, `heal_zclip` and `protect`, within the state of your optimizer.

        opt_state = protect(optax.adamw(1e-3)).init(params)
        opt_state.heal  # the HealState; in a chain it is the entry at the place of heal()

    Your program passes it from step to step, and reads it by the functions of `healcore.jax`, such
    as `last_decision` and `metrics`. Its fields are an encoding that a release may change. Start a
    run with a state from ``tx.init(params)``, never with a HealState made by hand.

    No other state has fields of these names, so that ``optax.tree.get(opt_state, "count")`` finds
    the optimizer's count. No array is empty, because Orbax cannot save empty arrays.
    """

    heal_engine: jax.Array
    """int32 (n,): `_Packed`, floats by their bits."""
    heal_records: jax.Array
    """int32 (records, 16): `RECORD_FIELDS` of the last steps, for the Healer. Step i is in row
    ``(i - 1) % records``. A dispatch (`lax.scan` over steps) has at most `records` steps."""
    heal_leaf_norms: jax.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping. Zeros while the
    caller passes `grad_norm`. It is only for reports: decisions do not depend on it."""
    heal_group_scale: Any = None
    """float32 (n,): the last factor of each tensor, of a policy that clips per tensor, else
    None."""
    heal_numbers: Any = None
    """float32 (6, n): ranges of the `optax.inject_hyperparams` numbers in the optimizer of
    `protect`, and the ranges in which the Healer holds them; see `optimizer_numbers`. None if the
    optimizer has no such number."""


class ProtectState(NamedTuple):
    """The state of `protect`: the healing state, and the state of the protected optimizer.

    `without_heal_state` takes the inner state out, and `with_heal_state` puts one in.
    """

    heal: HealState
    """What the engine knows of the run, and the decision of the last step."""
    heal_reset_moments: Any
    """bool 0-d: whether the last step that was not skipped cut the learning rate. The next step
    then resets the moments to zero. None if the policy does not reset moments."""
    inner_state: PyTree
    """The state of the optimizer, bit-identical after a skipped step."""


class ScaleByHealLrState(NamedTuple):
    """The state of `scale_by_heal_lr`.

    No other state in a chain has a field of this name, so that
    ``optax.tree.set(opt_state, heal_lr_scale=decision.lr_scale)`` finds it.
    """

    heal_lr_scale: jax.Array
    """The learning-rate multiplier, float32 0-d in (0, 1]."""


# -- the engine's state as one array ------------------------------------------------------------


class _Packed(NamedTuple):
    """What `HealState.heal_engine` holds.

    All fields except the last have the same numbers for each policy.
    """

    fingerprint: Any
    """`Engine.fingerprint` as two integers, or zeros for a policy whose numbers are arrays."""
    edit: Any
    """Number of the Healer's last edit."""
    decision: Decision
    """The decision of the last step as it was to be enforced, without `group_scale`."""
    engine: EngineState
    """The state without the fields in `learnt`."""
    learnt: tuple[Any, ...] = ()
    """The fields `clip`, `detectors` and `rules` of the state, which follow from the policy."""


def _packed(engine: EngineState, decision: Decision, **others: Any) -> _Packed:
    """The form of a state in which its parts that depend on the policy come last."""
    return _Packed(
        decision=decision._replace(group_scale=None),
        engine=engine._replace(clip=None, detectors=(), rules=()),
        learnt=(engine.clip, engine.detectors, engine.rules),
        **others,
    )


def _first(engine: Engine, tensors: int | None) -> _Packed:
    """The numbers and arrays before the first step, in NumPy."""
    digits = _fingerprint(engine)
    return _packed(
        engine.init(groups=tensors or 0),
        neutral(),
        fingerprint=tuple(np.frombuffer(bytes.fromhex(digits), ">i4").astype(np.int32)),
        edit=np.zeros((), np.int32),
    )


def _fingerprint(engine: Engine) -> str:
    """`Engine.fingerprint`, or `_NO_FINGERPRINT`."""
    if any(map(is_array, jax.tree.leaves(engine.config))):
        return _NO_FINGERPRINT
    return engine.fingerprint


_NO_FINGERPRINT = "0" * 16
"""Fingerprint in the state of a policy whose numbers are arrays."""
_ANY_POLICY = _first(Engine(EngineConfig()), None)._replace(learnt=())
"""The numbers that come first in the array, whatever the policy is."""
_PLACES: _Packed = jax.tree.unflatten(
    jax.tree.structure(_ANY_POLICY), range(len(jax.tree.leaves(_ANY_POLICY)))
)
"""The index of each of these numbers in the array."""


def _pack(tree: PyTree) -> Any:
    """Packs a tree of int32, float32 and bool arrays: int32 (n,), its numbers first.

    Outside of `in_one_kernel`, traced numbers become a chain of selections, which XLA compiles as
    one kernel. It makes a kernel of each number of a concatenation there.
    """
    bits = []
    for leaf in sorted(jax.tree.leaves(tree), key=_is_no_number):
        bits.append(leaf.view(np.int32) if leaf.dtype == np.float32 else leaf.astype(np.int32))
    numbers = [each for each in bits if not each.ndim]
    arrays = [each.ravel() for each in bits[len(numbers) :]]
    if not any(isinstance(each, Tracer) for each in bits):
        return np.concatenate([np.array(numbers, np.int32), *arrays])
    if compiles_one_kernel():
        return jnp.concatenate([jnp.stack(numbers), *arrays])
    vector = jnp.zeros(len(numbers), jnp.int32)
    index = lax.iota(np.int32, len(numbers))
    for i, number in enumerate(numbers):
        vector = lax.select(index == i, lax.broadcast(number, vector.shape), vector)
    return jnp.concatenate([vector, *arrays])


def _unpack(template: PyTree, vector: Any) -> Any:
    """Makes the tree of a vector that begins with its numbers; the reverse of `_pack`.

    Args:
        template: a tree with the structure, dtypes and shapes of the result, in NumPy. Of the
            numbers of a longer vector it may have the first ones only, as `_ANY_POLICY` has.
        vector: int32 (..., n) of NumPy or JAX.
    """
    leaves, structure = jax.tree.flatten(template)
    split = np.split if isinstance(vector, np.ndarray) else jnp.split
    order = sorted(range(len(leaves)), key=lambda i: _is_no_number(leaves[i]))
    bounds = np.cumsum([leaves[i].size for i in order])
    for i, part in zip(order, split(vector, bounds, axis=-1), strict=False):
        leaf = leaves[i]
        is_float = leaf.dtype == np.float32
        values = part.view(np.float32) if is_float else part.astype(leaf.dtype)
        leaves[i] = values.reshape(part.shape[:-1] + leaf.shape)
    return structure.unflatten(leaves)


def _is_no_number(leaf: Any) -> bool:
    """The key by which numbers come first, and all other arrays after them."""
    return leaf.ndim > 0


# -- in the step --------------------------------------------------------------------------------


def init(engine: Engine, leaves: int, records: int) -> HealState:
    """Makes the state before the first step, for ``tx.init(params)``.

    Args:
        engine: the engine of the policy.
        leaves: number of tensors with a gradient.
        records: number of steps whose records the state holds, at least the steps of one dispatch.

    Returns:
        The HealState, with a neutral decision and the engine's initial numbers.
    """
    tensors = leaves if engine.per_tensor else None
    first = _first(engine, tensors)
    return HealState(
        jnp.asarray(_pack(first)),
        jnp.asarray(_same_records(first.engine, records)),
        jnp.zeros((leaves,), jnp.float32),
        None if tensors is None else jnp.ones((tensors,), jnp.float32),
    )


def step(
    engine: Engine, state: HealState, signals: Signals, leaf_norms: jax.Array | None
) -> tuple[HealState, Decision]:
    """Judges one step, and keeps the dtypes of the state, because weak types would recompile.

    The numbers of the policy may be traced arrays, as in a sweep by `vmap`.

    Args:
        engine: the engine of the policy.
        state: the state before the step.
        signals: the signals of the step, 0-d.
        leaf_norms: norm of each gradient, float32 (n,), for reports, or None to keep the last
            norms.

    Returns:
        The new state, and the decision to enforce. It also skips an externally skipped step, in
        observe mode too.

    """
    vector, record, step, decision = in_one_kernel(
        _judge,
        engine.config,
        engine.limits_norm,
        _tensors(state),
        state.heal_engine,
        signals,
    )
    # XLA would compute them, and with them the engine, again in the kernel of each tensor.
    decision = decision._replace(
        skip=JAX.shared(decision.skip),
        grad_scale=JAX.shared(decision.grad_scale),
        lr_scale=JAX.shared(decision.lr_scale),
    )
    records = state.heal_records
    count = np.int32(len(records))
    # A Python number would be an int64 where the program has enabled x64.
    place = (lax.rem(step + (count - 1), count), np.int32(0))
    records = lax.dynamic_update_slice(records, record[None], place, allow_negative_indices=False)
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == norms.shape:
        norms = leaf_norms
    return HealState(vector, records, norms, decision.group_scale), decision


def _judge(
    config: EngineConfig,
    limits_norm: bool,
    tensors: int | None,
    vector: Any,
    signals: Signals,
) -> tuple[Any, ...]:
    """The new arrays of the state, the record and number of the step, the decision to enforce."""
    engine = Engine(config, limits_norm=limits_norm)
    packed: _Packed = _unpack(_first(engine, tensors), vector)
    new, decision = engine.step(_engine_state(packed), signals)
    if signals.externally_skipped is not None:
        # The engine does not include an external skip in its decision.
        decision = decision._replace(skip=decision.skip | signals.externally_skipped)
    template = neutral(groups=None if decision.group_scale is None else 1)
    decision = map_leaves(lambda like, leaf: jnp.asarray(leaf, like.dtype), template, decision)
    vector = _pack(_packed(new, decision, fingerprint=packed.fingerprint, edit=packed.edit))
    return vector, _pack(record_numbers(new)), new.step, decision


def _engine_state(packed: _Packed) -> EngineState:
    """The whole EngineState, the reverse of `_packed`."""
    clip, detectors, rules = packed.learnt
    return packed.engine._replace(clip=clip, detectors=detectors, rules=rules)


def has_norm_limit(state: HealState) -> Any:
    """Whether a rollback has limited the gradient norm below the policy's own clip.

    The value is not known while the step is traced, so the step asks on the device. A fixed clip is
    computed by optax's own operations only while no such limit is in force.

    Args:
        state: the state, traced or not.

    Returns:
        bool 0-d, traced if the state is.
    """
    return state.heal_engine[_PLACES.engine.norm_limit].view(jnp.float32) != 0


# -- between two steps --------------------------------------------------------------------------


def engine_state(engine: Engine, state: HealState) -> EngineState:
    """Unpacks the EngineState, for a checkpoint, `to_dict` or a report.

    Args:
        engine: the engine of the policy.
        state: the state, with or without a trace. Without one, this waits for the device.

    Returns:
        The EngineState in NumPy arrays, or in traced arrays if the state is traced.

    Raises:
        HealStateError: the state is of another policy or another type.
    """
    check(engine, state)
    vector = state.heal_engine
    if not isinstance(vector, Tracer):
        vector = jax.device_get(vector)
    return _engine_state(_unpack(_first(engine, _tensors(state)), vector))


def with_engine_state(engine: Engine, state: HealState, new: EngineState) -> HealState:
    """Replaces the EngineState, outside of `jit`, and resets the last decision to a neutral one.

    The fingerprint and the number of the edit stay. The records are those of the new state, so that
    no record of a later step is left.

    Args:
        engine: the engine of the policy.
        state: the HealState whose EngineState is replaced.
        new: the EngineState in NumPy arrays, as from `Engine.from_dict`.

    Returns:
        A HealState of the same structure, shapes and dtypes.

    Raises:
        StateError: `new` belongs to a model with another number of tensors.
    """
    tensors = _tensors(state)
    saved = new.last.decision.group_scale
    if saved is not None and len(saved) != tensors:
        raise StateError(
            f"the saved state is of {len(saved)} tensors, and this optimizer's state is of "
            f"{tensors}: it belongs to a model with other tensors; start from a fresh state"
        )
    head = _first(engine, tensors)
    packed = _packed(
        new,
        neutral(),
        fingerprint=head.fingerprint,
        edit=head.edit,
    )
    vector = _pack(packed)
    # An indexed update fails outside of jit on a mesh of several processes.
    is_kept = np.arange(len(vector)) == _PLACES.edit
    return state._replace(
        heal_engine=jnp.where(is_kept, state.heal_engine, vector),
        heal_records=jnp.asarray(_same_records(new, len(state.heal_records))),
        heal_group_scale=None if tensors is None else jnp.ones((tensors,), jnp.float32),
    )


def _same_records(state: EngineState, count: int) -> np.ndarray:
    """The record of a state's last step as each of its records, int32 (count, 16)."""
    return np.tile(_pack(record_numbers(state)), (count, 1))


def steps_judged(records: Any) -> Any:
    """The number of steps that the engine has judged, in a `HealState.heal_records`."""
    return records[..., RECORD_FIELDS.index("step")].max(-1)


def with_change_expected(state: HealState) -> HealState:
    """Opens the engine's grace window at the next step, see `healcore.jax.expect_change`.

    Args:
        state: the state, outside of a compiled step or traced.

    Returns:
        The state with one flag set, which the next step reads and clears.
    """
    return _with_number(state, _PLACES.engine.change_expected, 1)


def with_edit(state: HealState, number: int) -> HealState:
    """Sets the number of the Healer's last edit of the state.

    A step keeps the number, so a state computed from an older state has an older number. The driver
    recognizes by it a program that continues from the state before a rollback.

    Args:
        state: the state to mark.
        number: int32, higher than the number of any earlier edit of this run.
    """
    return _with_number(state, _PLACES.edit, number)


def edit_of(vector: np.ndarray) -> int:
    """The number of the Healer's last edit, in a `HealState.heal_engine` in host memory."""
    return int(vector[_PLACES.edit])


def _with_number(state: HealState, place: Any, number: int) -> HealState:
    """Replaces one number. The selection also works on a mesh of several processes."""
    vector = state.heal_engine
    is_here = np.arange(vector.shape[-1]) == place
    return state._replace(heal_engine=jnp.where(is_here, np.int32(number), vector))


def last_decision(state: HealState) -> Decision:
    """Unpacks the decision of the last step.

    Args:
        state: the state, traced or not.

    Returns:
        The decision in 0-d arrays, `group_scale` in (n,). Neutral before the first step and after
        `with_engine_state`.
    """
    decision = _unpack(_ANY_POLICY, state.heal_engine).decision
    return decision._replace(group_scale=state.heal_group_scale)


@jax.jit
def metrics(vector: jax.Array) -> dict[str, jax.Array]:
    """The numbers of the newest step, named for a logger by `record_metrics`.

    The loss is NaN until the first finite loss. One dispatch outside of a compiled step.

    Args:
        vector: `HealState.heal_engine`, or with a leading axis over the runs of a `vmap`.

    Returns:
        `heal/...` -> array 0-d, or (runs,).
    """
    packed: _Packed = _unpack(_ANY_POLICY, vector)
    values = dict(zip(RECORD_FIELDS, record_numbers(packed.engine), strict=True))
    values |= packed.engine.tally._asdict()
    return record_metrics(values)


def _tensors(state: HealState) -> int | None:
    """Number of tensors that a per-tensor policy clips, or None for any other policy."""
    factors = state.heal_group_scale
    if factors is None:
        return None
    return jnp.shape(factors)[-1]


# -- the policy of a state ----------------------------------------------------------------------


def check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state is a HealState of this policy.

    Compares the shapes, and the fingerprint unless the state is traced.

    Args:
        engine: the engine of the policy.
        state: what the program has passed as the state.
    """
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    size = _pack(_first(engine, _tensors(state))).size
    made_with = None  # unknown within `jit`
    if not isinstance(state.heal_engine, Tracer):
        numbers = np.asarray(state.heal_engine)[..., :2].ravel()[:2]
        made_with = numbers.astype(">i4").tobytes().hex()
    passed = _fingerprint(engine)
    is_other = made_with != passed and not {made_with, passed} & {None, _NO_FINGERPRINT}
    # A state of 0.4.0 has the records in its first array.
    is_other |= jnp.ndim(state.heal_records) != jnp.ndim(state.heal_engine) + 1
    if is_other or jnp.shape(state.heal_engine)[-1] != size:
        raise HealStateError(
            "this healing state belongs to another policy or release: the policy that made it is "
            f"{_policy_text(made_with)}, the policy passed here is "
            f"{_policy_text(passed)}. "
            "Pass the same policy, clip= and other keywords to protect and to the Healer, as in "
            "protect(tx, policy, clip=...) and Healer(policy, clip=...); for heal_zclip() write "
            'Healer("zclip"). To continue with another policy and reset its '
            "detectors: with_heal_state(without_heal_state(old), like=tx.init(params))"
        )


def no_heal_state_error(state: Any) -> HealStateError:
    """Makes the error for a state without a healing state, which `update` cannot judge with.

    Args:
        state: what the program has passed to `update`, usually a state of the bare optimizer.
    """
    return HealStateError(
        f"this optimizer state ({type(state).__name__}) belongs to an optimizer without healcore, "
        "or to another chain: an optimizer with protect(), heal() or heal_zclip() starts with its "
        "own tx.init(params). To continue from the moments of a bare or clipped optimizer: "
        "opt_state = with_heal_state(old_opt_state, like=tx.init(params))"
    )


def _policy_text(fingerprint: str | None) -> str:
    """The name of a preset, or what else is known of a policy."""
    if fingerprint in (None, _NO_FINGERPRINT):
        return "an unknown one"
    name = name_of(fingerprint)
    if name:
        return f'"{name}"'
    return f"your own or a changed one (fingerprint {fingerprint[:8]})"
