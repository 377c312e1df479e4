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
that the state belongs to it. `last_decision` and `metrics` read the newest record, which has the
same numbers for each policy.
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
from healcore.core.engine.state import Tally, record_numbers
from healcore.core.engine.state import metrics as engine_metrics
from healcore.core.errors import HealcoreError
from healcore.core.signals import Signals
from healcore.core.step_record import RECORD_FIELDS
from healcore.core.trees import map_leaves
from healcore.jax.compilation import JAX, in_one_kernel, is_one_kernel
from healcore.jax.trees import PyTree, is_array

DEFAULT_RECORDS = 64
"""Default number of steps whose records a HealState has."""


class HealStateError(HealcoreError, ValueError):
    """An optimizer state has no healing state, several, or one of another policy.

    The usual reasons are an optimizer that was made without healcore, a policy of `Healer` that
    differs from the policy of `protect`, and a step that returned a part of its state. The message
    says which, and what to write instead.
    """

    __module__ = "healcore.jax"

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
    """int32 (n,): the `EngineState`, floats by their bits."""
    heal_records: jax.Array
    """int32 (records, 27): the `_Row` of each of the last steps, for the Healer. Step i is in row
    ``(i - 1) % records``. A dispatch (`lax.scan` over steps) has at most `records` steps."""
    heal_leaf_norms: jax.Array
    """float32 (n,): norm of each gradient leaf at the last step, before clipping. Zeros while the
    caller passes `grad_norm`. It is only for reports: decisions do not depend on it."""
    heal_host: jax.Array
    """int32 (4,): the host's numbers, `Engine.fingerprint` in two integers (zeros for a policy
    whose numbers are arrays), the number of the Healer's last edit, and the number of the step at
    which a change is expected, or 0. No step writes them: that would cost a tiny step a quarter."""
    heal_group_scale: Any = None
    """float32 (n,): the last factor of each tensor, of a policy that clips per tensor, else
    None."""
    heal_numbers: Any = None
    """float32 (6, n): ranges of the `optax.inject_hyperparams` numbers in the optimizer of
    `protect`, and the ranges in which the Healer holds them; see `optax_states`. None if the
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


# -- numbers in one array -----------------------------------------------------------------------

_FINGERPRINT, _EDIT, _CHANGE_EXPECTED = slice(2), 2, 3
"""Places in `HealState.heal_host`."""
_NO_FINGERPRINT = "0" * 16
"""Fingerprint in the state of a policy whose numbers are arrays."""


class _Row(NamedTuple):
    """What a row of `HealState.heal_records` holds."""

    record: tuple[Any, ...]
    """The numbers in the order of `RECORD_FIELDS`."""
    tally: Tally
    """The counts since the run began."""
    decision: Decision
    """The decision of the step as it was to be enforced, without `group_scale`."""


def _row(state: EngineState, decision: Decision) -> _Row:
    """The row of the last step of a state."""
    return _Row(record_numbers(state), state.tally, decision._replace(group_scale=None))


_FIRST_ROW = _row(Engine(EngineConfig()).init(), neutral())
"""The row of a state before its first step, with the dtypes of each row."""


def _template(engine: Engine, state: HealState) -> EngineState:
    """The first EngineState, with the structure, dtypes and shapes of each later one."""
    return engine.init(groups=_tensors(state) or 0)


def _pack(tree: PyTree) -> Any:
    """Packs a tree of int32, float32 and bool arrays: int32 (n,), its numbers first.

    Traced numbers become a chain of selections, because XLA makes a kernel of each number of a
    concatenation, except within `in_one_kernel`, where a concatenation compiles faster.
    """
    bits = []
    for leaf in jax.tree.leaves(tree):
        bits.append(leaf.view(np.int32) if leaf.dtype == np.float32 else leaf.astype(np.int32))
    numbers = [each for each in bits if not each.ndim]
    arrays = [each.ravel() for each in bits if each.ndim]
    if not any(isinstance(each, Tracer) for each in bits):
        return np.concatenate([np.array(numbers, np.int32), *arrays])
    if is_one_kernel():
        return jnp.concatenate([each.reshape(-1) for each in numbers + arrays])
    vector = jnp.zeros(len(numbers), jnp.int32)
    index = lax.iota(np.int32, len(numbers))
    for i, number in enumerate(numbers):
        vector = lax.select(index == i, lax.broadcast(number, vector.shape), vector)
    return jnp.concatenate([vector, *arrays])


def _unpack(template: PyTree, vector: Any) -> Any:
    """Makes the tree of a vector that begins with its numbers; the reverse of `_pack`.

    Args:
        template: a tree with the structure, dtypes and shapes of the result, in NumPy.
        vector: int32 (..., n) of NumPy or JAX.
    """
    leaves, structure = jax.tree.flatten(template)
    order = sorted(range(len(leaves)), key=lambda i: leaves[i].ndim > 0)
    start = 0
    for i in order:
        leaf = leaves[i]
        part = vector[..., start : start + leaf.size]
        start += leaf.size
        is_float = leaf.dtype == np.float32
        if is_float:
            values = part.view(np.float32)
        else:
            values = part.astype(leaf.dtype)
        leaves[i] = values.reshape(part.shape[:-1] + leaf.shape)
    return structure.unflatten(leaves)


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
    if engine.per_tensor:
        tensors = leaves
    else:
        tensors = None
    first = engine.init(groups=tensors or 0)
    fingerprint = np.frombuffer(bytes.fromhex(_fingerprint(engine)), ">i4")
    return HealState(
        jnp.asarray(_pack(first)),
        jnp.asarray(_same_rows(first, records)),
        jnp.zeros((leaves,), jnp.float32),
        jnp.asarray([*fingerprint, 0, 0], jnp.int32),
        None if tensors is None else jnp.ones((tensors,), jnp.float32),
    )


def step(
    engine: Engine, state: HealState, signals: Signals, leaf_norms: jax.Array | None
) -> tuple[HealState, Decision, Any]:
    """Judges one step, and keeps the dtypes of the state, because weak types would recompile.

    The numbers of the policy may be traced arrays, as in a sweep by `vmap`.

    Args:
        engine: the engine of the policy.
        state: the state before the step.
        signals: the signals of the step, 0-d.
        leaf_norms: norm of each gradient, float32 (n,), for reports, or None to keep the last
            norms.

    Returns:
        The new state; the decision to enforce, which also skips an externally skipped step, in
        observe mode too; and whether a rollback has limited the norm below the policy's own clip,
        bool 0-d. A fixed clip is computed by optax's own operations only without such a limit.
    """
    template = _template(engine, state)

    def judge(vector: Any, host: Any, signals: Signals) -> tuple[Any, ...]:
        old = _expecting(_unpack(template, vector), host)
        new, decision = engine.step(old, signals)
        if signals.externally_skipped is not None:
            # The engine does not include an external skip in its decision.
            decision = decision._replace(skip=decision.skip | signals.externally_skipped)
        like = neutral(groups=None if decision.group_scale is None else 1)
        decision = map_leaves(lambda like, leaf: jnp.asarray(leaf, like.dtype), like, decision)
        return _pack(new), _pack(_row(new, decision)), new.step, new.norm_limit != 0, decision

    vector, row, number, limits_norm, decision = in_one_kernel(
        judge, state.heal_engine, state.heal_host, signals
    )
    if not is_one_kernel():
        # XLA would compute them, and with them the engine, again in the kernel of each tensor.
        decision = map_leaves(JAX.shared, decision)
    count = np.int32(len(state.heal_records))
    # A Python number would be an int64 where the program has enabled x64.
    place = (lax.rem(number + (count - 1), count), np.int32(0))
    records = lax.dynamic_update_slice(
        state.heal_records, row[None], place, allow_negative_indices=False
    )
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == norms.shape:
        norms = leaf_norms
    new = state._replace(
        heal_engine=vector,
        heal_records=records,
        heal_leaf_norms=norms,
        heal_group_scale=decision.group_scale,
    )
    return new, decision, limits_norm


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
    vector, host = state.heal_engine, state.heal_host
    if not isinstance(vector, Tracer):
        vector, host = jax.device_get((vector, host))
    return _expecting(_unpack(_template(engine, state), vector), host)


def _expecting(state: EngineState, host: Any) -> EngineState:
    """The state with the flag of a change that the host expects at its next step."""
    expected = state.change_expected | (state.step + 1 == host[_CHANGE_EXPECTED])
    return state._replace(change_expected=expected)


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
    state = _with_number(state, _CHANGE_EXPECTED, 0)
    return state._replace(
        heal_engine=jnp.asarray(_pack(new)),
        heal_records=jnp.asarray(_same_rows(new, len(state.heal_records))),
        heal_group_scale=None if tensors is None else jnp.ones((tensors,), jnp.float32),
    )


def _same_rows(state: EngineState, count: int) -> np.ndarray:
    """The row of a state's last step, with a neutral decision, as each of its records."""
    return np.tile(_pack(_row(state, neutral())), (count, 1))


def steps_judged(records: Any) -> Any:
    """The number of steps that the engine has judged, in a `HealState.heal_records`."""
    return records[..., RECORD_FIELDS.index("step")].max(-1)


def with_change_expected(state: HealState) -> HealState:
    """Opens the engine's grace window at the next step, see `healcore.jax.expect_change`.

    Args:
        state: the state, outside of a compiled step or traced.

    Returns:
        The state with the number of the next step in `heal_host`.
    """
    return _with_number(state, _CHANGE_EXPECTED, steps_judged(state.heal_records) + 1)


def with_edit(state: HealState, number: int) -> HealState:
    """Sets the number of the Healer's last edit of the state.

    A step keeps the number, so a state computed from an older state has an older number. The driver
    recognizes by it a program that continues from the state before a rollback.

    Args:
        state: the state to mark.
        number: int32, higher than the number of any earlier edit of this run.
    """
    return _with_number(state, _EDIT, number)


def edit_of(state: HealState) -> int:
    """The number of the Healer's last edit. Waits for the device."""
    return int(np.asarray(state.heal_host)[_EDIT])


def _with_number(state: HealState, place: int, number: Any) -> HealState:
    """Replaces one of the host's numbers. A selection also works on a mesh of several processes."""
    is_here = np.arange(4) == place
    number = jnp.asarray(number, jnp.int32)[..., None]
    return state._replace(heal_host=jnp.where(is_here, number, state.heal_host))


def _newest(records: Any) -> _Row:
    """The row of the last step, in arrays with the leading axes of a `HealState.heal_records`."""
    place = (steps_judged(records) - 1) % records.shape[-2]
    row = jnp.take_along_axis(records, place[..., None, None], axis=-2)
    return _unpack(_FIRST_ROW, row.squeeze(-2))


def last_decision(state: HealState) -> Decision:
    """Unpacks the decision of the last step.

    Args:
        state: the state, traced or not.

    Returns:
        The decision in 0-d arrays, `group_scale` in (n,). Neutral before the first step and after
        `with_engine_state`.
    """
    return _newest(state.heal_records).decision._replace(group_scale=state.heal_group_scale)


@jax.jit
def metrics(records: jax.Array) -> dict[str, jax.Array]:
    """The numbers of the newest step, named for a logger by `engine.state.metrics`.

    The loss is NaN until the first finite loss. One dispatch outside of a compiled step.

    Args:
        records: `HealState.heal_records`, or with a leading axis over the runs of a `vmap`.

    Returns:
        `heal/...` -> array 0-d, or (runs,).
    """
    newest = _newest(records)
    return engine_metrics(newest.record, newest.tally)


def _tensors(state: HealState) -> int | None:
    """Number of tensors that a per-tensor policy clips, or None for any other policy."""
    factors = state.heal_group_scale
    if factors is None:
        return None
    return jnp.shape(factors)[-1]


# -- the policy of a state ----------------------------------------------------------------------


def _fingerprint(engine: Engine) -> str:
    """`Engine.fingerprint`, or `_NO_FINGERPRINT`."""
    if any(map(is_array, jax.tree.leaves(engine.config))):
        return _NO_FINGERPRINT
    return engine.fingerprint


def check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state is a HealState of this policy.

    Compares the shapes, and the fingerprint unless the state is traced.

    Args:
        engine: the engine of the policy.
        state: what the program has passed as the state.
    """
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    size = sum(leaf.size for leaf in jax.tree.leaves(_template(engine, state)))
    found = (state.heal_engine, state.heal_records, state.heal_host)
    sizes = [getattr(array, "shape", ())[-1:] for array in found]
    is_other = sizes != [(size,), (_pack(_FIRST_ROW).size,), (4,)]
    made_with = None  # unknown within `jit`, and in a state of another release
    if sizes[-1] == (4,) and not isinstance(state.heal_host, Tracer):
        numbers = np.asarray(state.heal_host).reshape(-1, 4)[0, _FINGERPRINT]
        made_with = numbers.astype(">i4").tobytes().hex()
    passed = _fingerprint(engine)
    if is_other or (made_with != passed and not {made_with, passed} & {None, _NO_FINGERPRINT}):
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
    """What is known of a policy."""
    if fingerprint in (None, _NO_FINGERPRINT):
        return "an unknown one"
    return f"the one with fingerprint {fingerprint[:8]}"
