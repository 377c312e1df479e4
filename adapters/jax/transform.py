"""`heal` and `heal_zclip`: gradient transformations that come before the optimizer in a chain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Unpack

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from healcore.core.clipping.zclip import ZClipConfig
from healcore.core.detectors import nonfinite
from healcore.core.engine import Engine, EngineConfig, RuleConfig
from healcore.core.verdict import Cause, Decision
from healcore.jax import state as heal_state
from healcore.jax import updates as on_updates
from healcore.jax.axes import Axes, AxisName
from healcore.jax.meshes import on_mesh_of
from healcore.jax.records import STEPS, check_records
from healcore.jax.signals import count_leaves, make_signals, warn_if_no_loss
from healcore.jax.state import HealState

if TYPE_CHECKING:
    from healcore.policy import Overrides, PolicyLike

OnSkip = Literal["zero", "nan"]
_NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
_TARGETS = ("reciprocal", "mean", "max")


def heal(
    policy: PolicyLike = "default",
    *,
    on_skip: OnSkip = "zero",
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = STEPS,
    **overrides: Unpack[Overrides],
) -> optax.GradientTransformationExtraArgs:
    """Judges each step by a policy, and clips or replaces its gradients.

    A member of a chain cannot control the others. On a skip it passes on zeros, with which the
    optimizer after it still takes a step: moments decay, Adam and weight decay still move the
    parameters a little, counters count. Where a skip has to leave everything exactly as it was,
    use `protect`, or ``optax.chain(heal(policy, on_skip="nan"), optax.apply_if_finite(inner, 2**31
    - 1))``. The policy's LR multiplier is in the decision; `scale_by_heal_lr` applies it.

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig, whose numbers may be traced arrays.
        on_skip: what a skipped step's updates are: "zero", or "nan" as a signal to
            `optax.apply_if_finite` (NaN would ruin the state of any other optimizer).
        axis_name: mesh axes of a `shard_map` or `pmap` around the update along which the gradients
            are the same (averaged with `pmean`). Loss and norms are averaged over them, so that
            every device decides alike. Not needed under `jit` alone.
        shard_axis_name: mesh axes along which each device has its own part of the gradients; their
            norms are combined. With some leaves split and others whole pass `grad_norm` instead.
        records: see `protect`.
        **overrides: values to replace in the policy, ``clip={"max_norm": 1.0}``; see
            `healcore.policy.Overrides`.

    Returns:
        A transformation whose `update` takes, all optional and by keyword: `value` (loss, one
        floating number), `eval_loss` (NaN at steps without evaluation), `grad_norm` (when it has
        to be reduced over a mesh first), `update_norm`, `change_expected` and `externally_skipped`
        (bool each), and `learning_rate` (the schedule's: a limit on it is absolute). Without
        `value` the detectors of the loss are inactive. Unknown keywords are ignored. `update`
        raises SignalError, while tracing, for a signal that is not one number of the right kind.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(heal("zclip"), optax.sgd(0.1))
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> grads = {"w": jnp.full(3, jnp.nan)}
        >>> updates, state = tx.update(grads, state, params, value=jnp.float32(2.0))
        >>> bool(jnp.all(updates["w"] == 0))
        True
    """
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    _check_on_skip(on_skip)
    axes = Axes.of(axis_name, shard_axis_name)
    return _transformation(engine_of(policy, overrides), on_skip, axes, check_records(records))


def heal_zclip(
    z_threshold: chex.Numeric = 2.5,
    ema_decay: chex.Numeric = 0.97,
    warmup_steps: chex.Numeric = 25,
    target: Literal["reciprocal", "mean", "max"] = "reciprocal",
    max_norm: chex.Numeric | None = 1.0,
    on_skip: OnSkip = "zero",
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """ZClip with its faults fixed; replaces `optax.clip_by_global_norm`.

    Clips a gradient norm that stands out from its recent history, replaces a non-finite gradient
    (see `heal` for what a skip is in a chain), and adapts its baseline after a real level shift,
    where the published rule would clip every later step.

    Args:
        z_threshold: z-score above which a norm is a spike.
        ema_decay: decay of the norm's mean and variance per step, in (0, 1).
        warmup_steps: finite norms averaged before the z-score is used, at least 1.
        target: what a spike is clipped to.
        max_norm: absolute limit in addition; None for none.
        on_skip: see `heal`.
        axis_name: see `heal`.
        shard_axis_name: see `heal`.

    Returns:
        A transformation; see `heal` for the keywords of its `update`. Numbers may be arrays, so
        that ``optax.inject_hyperparams(heal_zclip)`` can schedule them.

    Raises:
        ValueError: a number is out of range, or `target` or `on_skip` is unknown.
        TypeError: an argument is not a number.

    References:
        Kumar et al., `ZClip: Adaptive Spike Mitigation for LLM Pre-Training
        <https://arxiv.org/abs/2504.02507>`_, 2025
    """
    _check_on_skip(on_skip)
    if target not in _TARGETS:
        raise ValueError(f"target must be one of {', '.join(_TARGETS)}, got {target!r}")
    clip = ZClipConfig(
        z_threshold=_number("z_threshold", z_threshold, above=0.0),
        ema_decay=_number("ema_decay", ema_decay, above=0.0, below=1.0),
        warmup_steps=_steps("warmup_steps", warmup_steps),
        target=target,
        max_norm=None if max_norm is None else _number("max_norm", max_norm, above=0.0),
    )
    config = EngineConfig(
        clip=("zclip", clip),
        detectors=(("nonfinite", nonfinite.Config()),),
        rules=(RuleConfig(causes=_NONFINITE, skip=True),),
    )
    return _transformation(Engine(config), on_skip, Axes.of(axis_name, shard_axis_name))


def unfused(engine: Engine, updates: optax.Updates) -> optax.Updates:
    """The gradients, behind a barrier in observe mode.

    In observe mode the optimizer gets them unchanged, and XLA would let the norm and the second
    moment share their squares, which it writes out to memory (the size of all parameters). The
    barrier prevents that; outside observe mode the scaling does.
    """
    return jax.lax.optimization_barrier(updates) if engine.mode == "observe" else updates


def enforce(engine: Engine, decision: Decision, updates: optax.Updates) -> optax.Updates:
    """Scales the gradients as decided. In observe mode they are not touched at all."""
    if engine.mode == "observe":
        return updates
    if decision.group_scale is not None:
        return on_updates.scale_each(updates, decision.group_scale * decision.grad_scale)
    if engine.config.clip is None:
        return updates
    return on_updates.scale(updates, decision.grad_scale)


def _transformation(
    engine: Engine, on_skip: OnSkip, axes: Axes, kept: int = STEPS
) -> optax.GradientTransformationExtraArgs:
    replace = on_updates.zero_where if on_skip == "zero" else on_updates.nan_where

    def init(params: optax.Params) -> HealState:
        return on_mesh_of(params, heal_state.init(engine, count_leaves(params), kept))

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
    ) -> tuple[optax.Updates, HealState]:
        del params, extra_args

        warn_if_no_loss(engine, value)
        signals, norms = make_signals(
            unfused(engine, updates),
            per_tensor=engine.per_tensor,
            value=value,
            eval_loss=eval_loss,
            grad_norm=grad_norm,
            update_norm=update_norm,
            change_expected=change_expected,
            externally_skipped=externally_skipped,
            learning_rate=learning_rate,
        )
        signals, norms = axes.signals(signals, norms, given_norm=grad_norm is not None)
        state, decision = heal_state.step(engine, state, signals, norms)
        if engine.mode == "observe" and externally_skipped is None:
            return updates, state
        return replace(decision.skip, enforce(engine, decision, updates)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_on_skip(on_skip: str) -> None:
    if on_skip not in ("zero", "nan"):
        raise ValueError(
            f"on_skip must be 'zero' or 'nan', got {on_skip!r}: 'nan' is for a chain that goes on "
            "with optax.apply_if_finite, 'zero' for any other"
        )


def _number(name: str, value: Any, *, above: float, below: float = math.inf) -> Any:
    """A threshold as float32; Python numbers are checked, traced arrays cannot be."""
    _check_numeric(name, value)
    if isinstance(value, int | float | np.number):
        if not above < value < below:
            limits = f"above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
            raise ValueError(f"{name} must be {limits}, got {value!r}")
        return float(value)
    return jnp.asarray(value, jnp.float32)


def _steps(name: str, value: Any) -> Any:
    _check_numeric(name, value)
    if isinstance(value, int | np.integer):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
        return int(value)
    if isinstance(value, float):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return jnp.asarray(value).astype(jnp.int32)


def _check_numeric(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is one number, or an array that may be traced."""
    if isinstance(value, bool) or not isinstance(
        value, int | float | np.number | np.ndarray | jax.Array
    ):
        raise TypeError(
            f"{name} must be a number or a 0-d array, got {value!r}: heal_zclip takes the numbers "
            "of ZClip. An optimizer goes after it, optax.chain(heal_zclip(), optax.adamw(1e-3)); "
            "a policy goes to heal or protect"
        )
