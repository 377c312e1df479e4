"""`protect`: wraps an optimizer so that skipped steps change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import chex
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from healcore.jax import state as heal_state
from healcore.jax import updates as on_updates
from healcore.jax.axes import Axes, AxisName
from healcore.jax.lr import injected_rates
from healcore.jax.meshes import on_mesh_of
from healcore.jax.records import STEPS, check_records
from healcore.jax.select_at_definition import step_or_keep
from healcore.jax.signals import count_leaves, make_signals, warn_if_no_loss
from healcore.jax.state import HealState
from healcore.jax.transform import enforce, unfused

if TYPE_CHECKING:
    from healcore.policy import Overrides, PolicyLike


class ProtectState(NamedTuple):
    """The healing state and that of the protected optimizer."""

    heal: HealState
    heal_update_norm: Any
    """float32 0-d: norm of the last update, 0 after a skip; None if the policy does not read it."""
    heal_bad_update: Any
    """bool 0-d: the optimizer made NaN or Inf of finite gradients at the last step. The update was
    not applied, and the next step reports it."""
    inner_state: Any
    """The state of the optimizer itself; bit-identical after a skipped step."""


def protect(
    inner: optax.GradientTransformation,
    policy: PolicyLike = "default",
    *,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = STEPS,
    **overrides: Unpack[Overrides],
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: clips its gradients, and skips a bad step exactly.

    On a skip every leaf of the inner state (moments, counters, schedules, accumulators, keys) is
    bit for bit what it was, and the updates are -0.0, which leaves every parameter bit-identical
    under ``optax.apply_updates``. The policy's LR multiplier is applied to the updates, weight
    decay included, in the same step. State outside the optimizer (BatchNorm) goes with `commit`.

    An optimizer can make NaN or Inf of finite gradients (Adam with ``eps=0``, a schedule that
    divides by 0). No such element reaches the parameters. In a tensor of up to 16,384 elements (a
    bias, a scale) it skips the whole update, and the next step counts as one with a bad gradient.
    Larger tensors are not checked, which would cost more than the step: there only the non-finite
    elements are left unchanged.

    In observe mode every step is judged and recorded in the state, and nothing is changed. A step
    with ``externally_skipped=True`` (an fp16 overflow, say) is skipped in every mode, neither
    learnt nor counted.

    Args:
        inner: any optax transformation that keeps the structure, shapes and dtypes of its state.
            With an `optax.MultiSteps` inside, each micro-batch is judged on its own, and one that
            is skipped does not enter the accumulator.
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig, whose numbers may be traced arrays.
        axis_name: mesh axes of a `shard_map` or `pmap` around the update along which the gradients
            are the same (averaged with `pmean`). Loss and norms are averaged over them, so that
            every device decides alike. Not needed under `jit` alone.
        shard_axis_name: mesh axes along which each device has its own part of the gradients; their
            norms are combined. With some leaves split and others whole pass `grad_norm` instead.
        records: steps whose records the state keeps for a `Healer` to read: as many as one dispatch
            takes (`lax.scan` over steps). With fewer, lines of the metrics are lost, but no order.
        **overrides: values to replace in the policy, ``clip={"max_norm": 1.0}``; see
            `healcore.policy.Overrides`.

    Returns:
        A transformation that takes the keywords of `heal`'s update and passes them, and all
        others, to `inner`. A policy that reads the norm of the updates gets that of the step
        before, since a step is judged before the optimizer makes its update.

    Raises:
        TypeError: `inner` is not an optax transformation.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = protect(optax.adamw(1e-3), "zclip")
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> grads = {"w": jnp.full(3, jnp.nan)}
        >>> updates, state = tx.update(grads, state, params, value=jnp.float32(2.0))
        >>> optax.apply_updates(params, updates)
        {'w': Array([1., 1., 1.], dtype=float32)}
        >>> int(optax.tree.get(state, "count"))
        0
    """
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    _check_optimizer(inner)
    axes = Axes.of(axis_name, shard_axis_name)
    engine, kept = engine_of(policy, overrides), check_records(records)
    inner = optax.with_extra_args_support(inner)
    reads_update_norm = "update_norm" in engine.needs

    def init(params: optax.Params) -> ProtectState:
        state = ProtectState(
            heal=heal_state.init(engine, count_leaves(params), kept),
            heal_update_norm=jnp.zeros((), jnp.float32) if reads_update_norm else None,
            heal_bad_update=jnp.zeros((), jnp.bool_),
            inner_state=inner.init(params),
        )
        return on_mesh_of(params, state)

    def measured(updates: optax.Updates) -> tuple[chex.Array | None, chex.Array]:
        """The norm, if the policy reads it, and whether the update is non-finite."""
        if not reads_update_norm:
            return None, axes.any(on_updates.not_finite(updates))
        norm = axes.norm(updates)
        return norm, ~jnp.isfinite(norm)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        eval_loss: ArrayLike | None = None,
        grad_norm: ArrayLike | None = None,
        update_norm: ArrayLike | None = None,
        change_expected: ArrayLike | None = None,
        externally_skipped: ArrayLike | None = None,
        learning_rate: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ProtectState]:
        if not isinstance(state, ProtectState):
            raise heal_state.no_heal_state_error(state)
        warn_if_no_loss(engine, value)
        given = {
            "value": value,
            "eval_loss": eval_loss,
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "change_expected": change_expected,
            "externally_skipped": externally_skipped,
            "learning_rate": learning_rate,
        }
        given = {name: signal for name, signal in given.items() if signal is not None}
        last = 0.0 if state.heal_update_norm is None else state.heal_update_norm
        known = {"update_norm": jnp.where(state.heal_bad_update, jnp.inf, last), **given}
        rates = injected_rates(state.inner_state) if engine.limits_lr else []
        if len(rates) == 1:
            known.setdefault("learning_rate", rates[0])
        signals, norms = make_signals(
            unfused(engine, updates), per_tensor=engine.per_tensor, **known
        )
        signals, norms = axes.signals(signals, norms, given_norm=grad_norm is not None)
        heal, decision = heal_state.step(engine, state.heal, signals, norms)

        def inner_step(updates: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            return inner.update(updates, inner_state, params, **given, **extra_args)

        if engine.mode == "observe" and externally_skipped is None:
            updates, inner_state = inner_step(updates, state.inner_state, params)
            norm, bad = measured(updates)
        else:
            # Zeros instead of the bad gradients: with them a loop in the optimizer (line search,
            # Newton-Schulz) terminates. It costs nothing: XLA fuses the select with the scaling.
            updates = on_updates.zero_where(decision.skip, enforce(engine, decision, updates))
            updates, inner_state = step_or_keep(
                inner_step, decision.skip, updates, state.inner_state, params
            )
            if engine.cuts_lr:
                updates = on_updates.scale(updates, decision.lr_scale)
            norm, bad = measured(updates)
            skipped, bad = decision.skip | bad, bad & ~decision.skip
            updates = on_updates.no_update_where(skipped, updates)
            norm = None if norm is None else jnp.where(skipped, 0.0, norm)
        return updates, ProtectState(heal, norm, bad, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_optimizer(inner: Any) -> None:
    """Raises TypeError unless `inner` has what optax calls: `init` and `update`."""
    made = not isinstance(inner, type)
    if made and callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None)):
        return  # optax.MultiSteps is not a GradientTransformation, and works
    name = getattr(inner, "__name__", type(inner).__name__)
    write = "protect(optax.adamw(1e-3))"
    if isinstance(inner, bool | int | float):
        got, write = f"the number {inner!r}", f"protect(optax.adamw({inner!r}))"
    elif isinstance(inner, str):
        got, write = f"{inner!r}", f"protect(optax.adamw(1e-3), {inner!r}): the policy comes second"
    elif isinstance(inner, type) or callable(inner):
        got, write = f"the function {name} itself", f"protect({name}(...)): call it first"
    elif hasattr(inner, "tx"):  # a TrainState, an nnx.Optimizer
        got, write = f"a {name}", f"tx=protect(optax.adamw(1e-3)) where the {name} is made"
    else:
        got = f"a {name}"
    raise TypeError(
        f"protect takes an optax transformation, which has init and update, got {got}: "
        f"write {write}"
    )
