"""`HealState`: the healing part of an optimizer state, and what a step does with it.

The engine works on an `EngineState`, a tree of some fifty numbers. An optimizer state holds a
`HealState` instead, which packs these numbers into the first row of one array, because each array
costs a compiled step time (`engine_rows`):

    HealState --unpack--> EngineState --Engine.step--> EngineState --pack--> HealState
                                   ^                |
                           Signals of the step      Decision, which the transformation enforces

All of this is traced into the user's step (`step`). Outside of it, the Healer and the public
functions of `healcore.jax` read and replace the state: `engine_state` unpacks it to NumPy, and
`with_engine_state` packs a changed one. A HealState carries no policy, only the policy's
fingerprint, so each of them takes the engine, and checks that the state belongs to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from healcore.core.decision import Decision
from healcore.core.engine import Engine, EngineState, StateError, neutral
from healcore.core.signals import Signals
from healcore.core.step_record import record_metrics
from healcore.core.trees import map_leaves
from healcore.jax import engine_rows
from healcore.jax.array_leaves import PyTree
from healcore.jax.array_namespace import JAX
from healcore.jax.engine_rows import RowLayout
from healcore.jax.gradients import compiled
from healcore.jax.one_kernel import is_one_kernel, one_kernel
from healcore.jax.state_policy import (
    check_policy,
    fingerprint_columns,
    no_heal_state_error,
    remember_policy,
)

DEFAULT_RECORDS = 64
"""Default number of steps whose records a HealState has."""


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
    """int32 (1 + records, n): a row with the numbers of the core's EngineState and of the last
    decision, and the rows of the last steps, see `engine_rows`. A dispatch (`lax.scan` over steps)
    has at most `records` steps."""
    heal_windows: tuple[jax.Array, ...]
    """The arrays of the EngineState, such as the last norms of a rule. Empty for `default`."""
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


def init(engine: Engine, leaves: int, records: int) -> HealState:
    """Makes the state before the first step, for ``tx.init(params)``.

    Args:
        engine: the engine of the policy.
        leaves: number of tensors with a gradient.
        records: number of steps whose rows the state holds, at least the steps of one dispatch.

    Returns:
        The HealState, with a neutral decision and the engine's initial numbers in each row.
    """
    remember_policy(engine)
    tensors = None
    if engine.per_tensor:
        tensors = leaves
    first = engine.init(groups=tensors or 0)
    layout = RowLayout.of(engine, tensors)
    decision = neutral(groups=tensors)
    row = layout.pack([*fingerprint_columns(engine), 0, 0], first, decision, np)
    group_scale = decision.group_scale
    if group_scale is not None:
        group_scale = jnp.asarray(group_scale)
    return HealState(
        jnp.tile(row, (1 + records, 1)),
        tuple(map(jnp.asarray, layout.windows_of(first))),
        jnp.zeros((leaves,), jnp.float32),
        group_scale,
    )


def step(
    engine: Engine, state: HealState, signals: Signals, leaf_norms: jax.Array | None
) -> tuple[HealState, Decision]:
    """Judges one step, and keeps the dtypes of the state, because weak types would recompile.

    The numbers of the policy may be traced arrays, as in a sweep by `vmap`. So the engine is taken
    apart: its arrays are arguments of the compiled function, and the rest is a static argument.

    Args:
        engine: the engine of the policy.
        state: the state before the step.
        signals: the signals of the step, 0-d.
        leaf_norms: norm of each gradient, float32 (n,), for reports, or None to keep the last
            norms.

    Returns:
        The new state, and the decision to enforce. It also skips an externally skipped step, in
        observe mode too.

    Raises:
        HealStateError: like `engine_state`.
    """
    _check(engine, state)
    leaves, structure = jax.tree.flatten(engine.config)
    arrays: list[Any] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, jax.Array | np.ndarray):  # it may be traced
            arrays.append(leaf)
            rest.append(None)
        else:
            rest.append(leaf)
    policy = structure, tuple(rest), engine.limits_norm
    return _step(policy, arrays, state, signals, leaf_norms)


@partial(compiled, static=(0,))
def _step(
    policy: Any, arrays: list[Any], state: HealState, signals: Signals, leaf_norms: jax.Array | None
) -> tuple[HealState, Decision]:
    """Judges one step. `policy` is the hashable part of the engine, `arrays` the other part."""
    row, windows, number, decision = _judge_in_one_kernel(
        policy,
        _tensors(state),
        arrays,
        engine_rows.current_row(state.heal_engine),
        state.heal_windows,
        signals,
    )
    if not is_one_kernel():
        # XLA would compute them, and with them the engine, again in the kernel of each tensor.
        decision = decision._replace(
            skip=JAX.shared(decision.skip),
            grad_scale=JAX.shared_float(decision.grad_scale),
            lr_scale=JAX.shared_float(decision.lr_scale),
        )
    norms = state.heal_leaf_norms
    if leaf_norms is not None and leaf_norms.shape == norms.shape:
        norms = leaf_norms
    rows = engine_rows.with_row(state.heal_engine, row, number)
    return HealState(rows, windows, norms, decision.group_scale), decision


def _judge_row(
    policy: Any, tensors: int | None, arrays: list[Any], row: Any, windows: Any, signals: Signals
) -> tuple[jax.Array, tuple[Any, ...], jax.Array, Decision]:
    """The new row, the new windows, the number of the step, and the decision to enforce."""
    structure, rest, limits_norm = policy
    left = iter(arrays)
    leaves = []
    for leaf in rest:
        if leaf is None:
            leaf = next(left)
        leaves.append(leaf)
    config = structure.unflatten(leaves)
    engine = Engine(config, limits_norm=limits_norm)
    layout = RowLayout.of(engine, tensors)
    new, decision = engine.step(layout.unpack(row, windows), signals, xp=JAX)
    if signals.externally_skipped is not None:
        # The engine does not include an external skip in its decision.
        decision = decision._replace(skip=decision.skip | signals.externally_skipped)
    tensors_of_template = None
    if decision.group_scale is not None:
        tensors_of_template = 1
    template = neutral(groups=tensors_of_template)
    decision = map_leaves(_as_dtype_of, template, decision)
    head = list(jnp.unstack(row[: engine_rows.HEAD_SIZE]))
    if signals.loss is not None:
        head[engine_rows.LOSS_SEEN] |= jnp.isfinite(signals.loss)
    return layout.pack(head, new, decision, jnp), layout.windows_of(new), new.step, decision


def _as_dtype_of(template: Any, leaf: Any) -> jax.Array:
    """A leaf of the decision with the dtype of the same leaf of a neutral decision."""
    return jnp.asarray(leaf, template.dtype)


_judge_in_one_kernel = one_kernel(_judge_row, static=(0, 1))


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
    _check(engine, state)
    rows, windows = state.heal_engine, state.heal_windows
    if isinstance(rows, Tracer):
        row = engine_rows.current_row(rows)
    else:
        rows, windows = jax.device_get((rows, windows))
        row = rows[0]
    return RowLayout.of(engine, _tensors(state)).unpack(row, windows)


def has_norm_limit(engine: Engine, state: HealState) -> Any:
    """Whether a rollback has limited the gradient norm below the policy's own clip.

    The value is not known while the step is traced, so the step asks on the device. A fixed clip is
    computed by optax's own operations only while no such limit is in force.

    Args:
        engine: the engine of the policy.
        state: the state, traced or not.

    Returns:
        bool 0-d, traced if the state is.
    """
    layout = RowLayout.of(engine, _tensors(state))
    places: EngineState = layout.structure.unflatten(range(len(layout.leaves)))
    bits = state.heal_engine[0, layout.column(places.norm_limit)]
    return lax.bitcast_convert_type(bits, jnp.float32) != 0


def with_engine_state(engine: Engine, state: HealState, new: EngineState) -> HealState:
    """Replaces the EngineState, outside of `jit`, and resets the last decision to a neutral one.

    The fingerprint and the number of the edit stay. The new row is also the row of its step in the
    ring, so that a Healer reads the same numbers in both.

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
    layout = RowLayout.of(engine, tensors)
    decision = neutral(groups=tensors)
    row = layout.pack([0, 0, 0, new.last.loss != 0], new, decision, np)
    rows = state.heal_engine
    # An indexed update fails outside of jit on a mesh of several processes.
    place = np.arange(len(rows))[:, None]
    is_new = (place == 0) | (place == engine_rows.ring_row(new.step, rows))
    # The fingerprint and the edit are not of the EngineState.
    is_kept = np.arange(len(row)) <= engine_rows.EDIT
    group_scale = None
    if tensors is not None:
        group_scale = jnp.asarray(decision.group_scale)
    return state._replace(
        heal_engine=jnp.where(is_new & ~is_kept, row, rows),
        heal_windows=tuple(map(jnp.asarray, layout.windows_of(new))),
        heal_group_scale=group_scale,
    )


def with_change_expected(state: HealState) -> HealState:
    """Opens the engine's grace window at the next step, see `healcore.jax.expect_change`.

    Args:
        state: the state, outside of a compiled step or traced.

    Returns:
        The state with one flag set, which the next step reads and clears.
    """
    return _with_number(state, engine_rows.CHANGE_EXPECTED, 1)


def with_edit(state: HealState, number: int) -> HealState:
    """Sets the number of the Healer's last edit of the state.

    A step keeps the number, so a state computed from an older state has an older number. The driver
    recognizes by it a program that continues from the state before a rollback.

    Args:
        state: the state to mark.
        number: int32, higher than the number of any earlier edit of this run.
    """
    return _with_number(state, engine_rows.EDIT, number)


def _with_number(state: HealState, column: int, number: int) -> HealState:
    """Replaces one number of row 0. The selection also works on a mesh of several processes."""
    rows = state.heal_engine
    here = np.zeros(rows.shape[-2:], bool)
    here[0, column] = True
    return state._replace(heal_engine=jnp.where(here, np.int32(number), rows))


def last_decision(state: HealState) -> Decision:
    """Unpacks the decision of the last step.

    Args:
        state: the state, traced or not.

    Returns:
        The decision in 0-d arrays, `group_scale` in (n,). Neutral before the first step and after
        `with_engine_state`.
    """
    return engine_rows.decision_of(state.heal_engine, state.heal_group_scale)


@jax.jit
def metrics(rows: jax.Array) -> dict[str, jax.Array]:
    """The numbers of the newest step, named for a logger by `record_metrics`.

    The loss is NaN until the first finite loss. (The engine's state has 0 there, because a
    checkpoint with a NaN would count as bad.) One dispatch outside of a compiled step.

    Args:
        rows: `HealState.heal_engine`, int32 (1 + records, n), or with a leading axis over the runs
            of a `vmap`.

    Returns:
        `heal/...` -> array 0-d, or (runs,).
    """
    if rows.ndim > 2:  # the state has the runs of a `vmap`
        return jax.vmap(metrics)(rows)
    values = engine_rows.newest(rows)
    has_loss = rows[0, engine_rows.LOSS_SEEN] != 0
    values["loss"] = jnp.where(has_loss, values["loss"], jnp.nan)
    return record_metrics(values)


def _tensors(state: HealState) -> int | None:
    """Number of tensors that a per-tensor policy clips, or None for any other policy."""
    factors = state.heal_group_scale
    if factors is None:
        return None
    return jnp.shape(factors)[-1]


def _check(engine: Engine, state: Any) -> None:
    """Raises HealStateError unless the state is a HealState of this policy."""
    if not isinstance(state, HealState):
        raise no_heal_state_error(state)
    layout = RowLayout.of(engine, _tensors(state))
    check_policy(engine, layout, state.heal_engine, state.heal_windows)
