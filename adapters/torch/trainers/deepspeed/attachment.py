"""Defines `heal_engine`, which heals a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from healcore.console import Console, checked
from healcore.core.engine import Engine
from healcore.torch.attachment import heal_optimizer, healing_of
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
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
    """Heals a DeepSpeed engine: the policy judges every step, then clips it or skips it.

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        heal = heal_engine(engine, "default")

    Losses are taken from `engine.backward(loss)`; the loop stays as it is. With ZeRO-1 and ZeRO-2
    the norm is taken over all groups and ranks. For rollbacks pass `engine_state(engine)` to a
    `Healer`.

    DeepSpeed's `gradient_clipping` is taken over, because the policy has to see the norm before it:
    it becomes the `max_norm` of the policy's clipping, or is enforced after it. Under "default" it
    then clips alone, as without healcore. A step that DeepSpeed skips itself is judged when the
    next loss is observed, or by the Healer before: as a non-finite one, unless a dynamic loss scale
    is being searched for.

    Args:
        engine: what `deepspeed.initialize` returns first.
        policy: as for `attach`.
        console: as for `attach`.
        **overrides: as for `attach`.

    Returns:
        The handle, as of `attach`; `detach()` gives the engine back as it was.

    Raises:
        AttachError: a pipeline engine, ZeRO-3, offloading, experts, model parallelism, or what
            `attach` does not take. Nothing has changed then.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    # Here: `import healcore.torch` loads no pydantic.
    from healcore.policy import engine_of
    from healcore.policy.loader import resolve
    from healcore.policy.trainer_limit import with_limit

    def core() -> Engine:
        return engine_of(with_limit(resolve(policy, overrides), gradient_clipping(engine)))

    printed = checked(console)
    healing = heal_basic_optimizer(engine, core)
    healing.hooks.incident_log.console = printed
    return healing


def heal_basic_optimizer(
    engine: Any, core_of: Callable[[], Engine], process_group: Any = "auto"
) -> Healing:
    """`heal_engine` with an engine of healcore instead of a policy."""
    check(engine)
    core = core_of()
    _check_policy(engine, core)
    basic, limit = engine.basic_optimizer, gradient_clipping(engine)
    taken_over = None if core.mode == "observe" else limit
    enforced_after = taken_over if taken_over and not _has_limit(core, taken_over) else 0.0
    # What is enforced outside of one call of the optimizer has to be known on the host.
    needs_host = enforced_after > 0.0 or (is_sharded(engine) and len(basic.param_groups) > 1)
    healing = heal_optimizer(
        basic,
        lambda: core,
        engine="host" if needs_host else "auto",
        process_group=process_group,
        measurer=partial(EngineMeasurer, engine),
        hooks=partial(EngineHooks, engine, taken_over, enforced_after),
    )
    backward = engine.backward

    @functools.wraps(backward)
    def observed(loss: Any, *args: Any, **kwargs: Any) -> Any:
        healing.observe(loss)
        return backward(loss, *args, **kwargs)

    changes: ExitStack = healing.hooks.changes  # type: ignore[attr-defined]
    changes.enter_context(replaced(engine, "backward", observed))
    if taken_over:
        _set_clipping(engine, 0.0)
        changes.callback(_set_clipping, engine, taken_over)
    return healing


def gradient_clipping(engine: Any) -> float | None:
    """The norm that DeepSpeed clips at, or the one that was taken over, or None."""
    healing = healing_of(engine.basic_optimizer)
    if healing is not None and isinstance(healing.hooks, EngineHooks):
        return healing.hooks.taken_over
    return float(engine.gradient_clipping() or 0.0) or None


def _has_limit(core: Engine, limit: float) -> bool:
    """Whether the policy always clips at `limit` or below it, up to rounding."""
    rule, config = core.config.clip or ("none", None)
    own = None if rule == "adagc" else getattr(config, "max_norm", None)  # adagc: in warm-up only
    return own is not None and float(own) <= limit * (1 + 1e-6)


def _set_clipping(engine: Any, limit: float) -> None:
    """Sets DeepSpeed's own limit, 0 for none. Its wrapper of the optimizer has a copy."""
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
            f"heal_engine takes the engine, got {type(engine).__name__}: pass what "
            "deepspeed.initialize returns first, or use attach(optimizer) without DeepSpeed"
        )
    for applies, what in _obstacles(engine):
        if applies:
            raise AttachError(f"this DeepSpeed engine cannot be healed: {what}")


def _check_policy(engine: Any, core: Engine) -> None:
    """Raises AttachError if the policy needs something that this engine lacks."""
    flattened = is_sharded(engine) or hasattr(engine.optimizer, "fp32_groups_flat")
    if core.per_tensor and flattened:
        raise AttachError(
            "this policy clips each tensor by its own history, and this DeepSpeed engine steps "
            'flattened groups: use clip={"kind": "zclip"}, or ZeRO stage 0'
        )
    if core.clips_updates and is_sharded(engine):
        raise AttachError(
            "this policy has [update_clip], and with ZeRO the update of a step is made group by "
            "group, on every rank its own part: use update_clip=None, or ZeRO stage 0"
        )


def _obstacles(engine: Any) -> list[tuple[bool, str]]:
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    zero = engine._config.zero_config
    mpu = engine.mpu
    parallel = getattr(mpu, "get_model_parallel_world_size", lambda: 1)()
    return [
        (hasattr(engine, "train_batch"), "a pipeline engine steps inside train_batch()"),
        (
            engine.basic_optimizer is None,
            "it has no optimizer; pass optimizer=... to deepspeed.initialize",
        ),
        (
            stage >= 3,
            "ZeRO-3 partitions the weights, steps them in sub-groups, and may swap them out in "
            "between, so that no moment has the whole step; use stage 1 or 2, or FSDP2 with "
            "attach()",
        ),
        (
            stage == 0 and engine.fp16_enabled(),
            "with fp16 and ZeRO stage 0 DeepSpeed 0.19 divides the gradients by its loss scale "
            "without having multiplied the loss by it, so that their norm is wrong; use stage 1",
        ),
        (
            bool(zero.offload_optimizer or zero.offload_param or engine.zenflow),
            "with offloading the update runs outside of optimizer.step(); leave offload_optimizer, "
            "offload_param and zenflow out",
        ),
        (
            stage in (1, 2) and not zero.compute_grad_norm,
            "zero_optimization.compute_grad_norm is false, and the policy needs the norm",
        ),
        (engine.has_moe_layers, "the experts' gradients are on some ranks only"),
        (parallel > 1, "with model parallelism each rank has the norm of its part only"),
        (
            any(
                getattr(each, name, None)
                for each in (engine, optimizer)
                for name in ("torch_autocast_z0_gradscaler", "torch_autocast_gradscaler")
            ),
            "torch_autocast with float16 has a GradScaler per group; use the fp16 or bf16 section",
        ),
    ]
