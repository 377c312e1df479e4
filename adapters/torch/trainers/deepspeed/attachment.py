"""Defines `heal_engine`, which heals a DeepSpeed engine."""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from healcore.console import Console, checked
from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.torch.attachment import Healing, heal_optimizer, healing_of
from healcore.torch.trainers import replaced
from healcore.torch.trainers.deepspeed.hooks import EngineHooks, EngineMeasurer, is_sharded

if TYPE_CHECKING:
    from healcore.policy import Overrides, PolicyLike


def heal_engine(
    engine: nn.Module,
    policy: PolicyLike = "default",
    *,
    console: Console = "auto",
    **overrides: Unpack[Overrides],
) -> Healing:
    """Heals a DeepSpeed engine: the policy judges every step, and clips or skips the step.

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        heal = heal_engine(engine, "default")

    Losses are observed in `engine.backward(loss)`, so the loop does not change. With ZeRO-1 and
    ZeRO-2 the norm is taken over all groups and ranks. For rollbacks pass `engine_state(engine)` to
    a `Healer`.

    DeepSpeed's own clipping is switched off, because the policy needs the norm before clipping. Its
    limit (`gradient_clipping`) becomes the `max_norm` of the policy's clipping. Under "default"
    this limit is then the only clipping, as without healcore.

    A step that DeepSpeed itself skips is judged when the next loss is observed, or earlier by the
    Healer. It counts as non-finite, unless DeepSpeed is searching a dynamic loss scale.

    Args:
        engine: the engine, first result of `deepspeed.initialize`.
        policy: as for `attach`.
        console: as for `attach`.
        **overrides: as for `attach`.

    Returns:
        The same handle as from `attach`. `detach()` restores the engine.

    Raises:
        AttachError: a pipeline engine, ZeRO-3, offloading, experts, model parallelism, a policy
            that cannot hold DeepSpeed's limit, or anything that `attach` refuses. The engine is
            unchanged.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """
    # Imported here, so that `import healcore.torch` does not load pydantic.
    from healcore.policy import engine_of
    from healcore.policy.loader import resolve, with_limit

    console = checked(console)
    check(engine)
    core = engine_of(with_limit(resolve(policy, overrides), gradient_clipping(engine)))
    healing = heal_basic_optimizer(engine, core)
    healing.hooks.incident_log.console = console
    return healing


def heal_basic_optimizer(engine: Any, core: Engine, process_group: Any = "auto") -> Healing:
    """Like `heal_engine`, for a checked engine and with a healcore Engine instead of a policy."""
    limit = None if core.mode == "observe" else gradient_clipping(engine)
    _check_policy(engine, core, limit)
    basic, sharded = engine.basic_optimizer, is_sharded(engine)
    healing = heal_optimizer(
        basic,
        core,
        # A decision for several calls of the optimizer has to be on the host.
        engine="host" if sharded and len(basic.param_groups) > 1 else "auto",
        process_group=process_group,
        measurer=partial(EngineMeasurer, engine),
        healed_step=partial(EngineHooks, engine, limit),
    )
    backward = engine.backward

    @functools.wraps(backward)
    def observed(loss: Any, *args: Any, **kwargs: Any) -> Any:
        healing.observe(loss)
        return backward(loss, *args, **kwargs)

    changes = healing.hooks.changes
    changes.enter_context(replaced(engine, "backward", observed))
    if limit:
        _set_clipping(engine, 0.0)
        changes.callback(_set_clipping, engine, limit)
    return healing


def gradient_clipping(engine: Any) -> float | None:
    """DeepSpeed's max gradient norm, also while healcore enforces it, or None."""
    healing = healing_of(engine.basic_optimizer)
    if healing is not None and isinstance(healing.hooks, EngineHooks):
        return healing.hooks.adopted_limit
    return float(engine.gradient_clipping() or 0.0) or None


def _set_clipping(engine: Any, limit: float) -> None:
    """Sets DeepSpeed's own limit, 0 for none, also in its wrapper of the optimizer."""
    engine._config.gradient_clipping = limit
    if engine.optimizer is not engine.basic_optimizer:
        engine.optimizer.clip_grad = limit


def check(engine: Any) -> None:
    """Raises AttachError unless this engine can be healed."""
    # By name: DeepSpeed need not be installed.
    if not any(
        kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed.")
        for kind in type(engine).__mro__
    ):
        raise AttachError(
            f"heal_engine takes a DeepSpeed engine, got {type(engine).__name__}: pass the first "
            "result of deepspeed.initialize, or use attach(optimizer) without DeepSpeed"
        )
    for applies, reason in _obstacles(engine):
        if applies:
            raise AttachError(f"this DeepSpeed engine cannot be healed: {reason}")


def _check_policy(engine: Any, core: Engine, limit: float | None) -> None:
    """Raises AttachError if the policy needs something that this engine lacks."""
    flattened = is_sharded(engine) or hasattr(engine.optimizer, "fp32_groups_flat")
    if core.per_tensor and flattened:
        raise AttachError(
            "this policy clips each tensor by its own history, and this DeepSpeed engine steps "
            'flattened groups: use clip={"kind": "zclip"}, or ZeRO stage 0'
        )
    rule, config = core.config.clip or ("none", None)
    # adagc applies its max_norm during warm-up only.
    max_norm = None if rule == "adagc" else getattr(config, "max_norm", None)
    if limit and (max_norm is None or float(max_norm) > limit * (1 + 1e-6)):
        raise AttachError(
            f"gradient_clipping = {limit:g} clips before the policy can measure the norm, and this "
            "policy cannot hold the limit: set gradient_clipping to 0 in DeepSpeed's config"
        )


def _obstacles(engine: Any) -> list[tuple[bool, str]]:
    """Pairs of a condition and the reason why an engine with that condition cannot be healed."""
    stage, zero = engine.zero_optimization_stage(), engine._config.zero_config
    parallel = getattr(engine.mpu, "get_model_parallel_world_size", lambda: 1)()
    scalers = ("torch_autocast_z0_gradscaler", "torch_autocast_gradscaler")
    float16 = any(getattr(x, name, None) for x in (engine, engine.optimizer) for name in scalers)
    offloads = bool(zero.offload_optimizer or zero.offload_param or engine.zenflow)
    without_norm = stage in (1, 2) and not zero.compute_grad_norm
    return [
        (hasattr(engine, "train_batch"), "a pipeline engine steps inside train_batch()"),
        (engine.basic_optimizer is None, "it has no optimizer"),
        (stage >= 3, "ZeRO-3 never has the whole step at once; use stage 1 or 2, or FSDP2"),
        (
            stage == 0 and engine.fp16_enabled(),
            "with fp16 and ZeRO stage 0 DeepSpeed 0.19 divides the gradients by its loss scale "
            "but does not multiply the loss by it, so the norm is wrong; use stage 1",
        ),
        (offloads, "with offloading the update runs outside of optimizer.step()"),
        (without_norm, "zero_optimization.compute_grad_norm is false"),
        (engine.has_moe_layers, "the experts' gradients are on some ranks only"),
        (parallel > 1, "with model parallelism each rank has the norm of its part only"),
        (float16, "torch_autocast with float16 has a GradScaler per group; use bf16"),
    ]
