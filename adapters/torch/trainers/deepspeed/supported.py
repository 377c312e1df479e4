"""Checks whether a DeepSpeed engine can be healed, and says why if it cannot."""

from __future__ import annotations

from typing import Any

from healcore.core.engine import Engine
from healcore.torch.errors import AttachError


def is_sharded(engine: Any) -> bool:
    """Whether each rank's optimizer has flat pieces of all parameters (ZeRO-1, ZeRO-2, BF16)."""
    return hasattr(engine.optimizer, "partition_count")


def dynamic_scale(engine: Any) -> bool:
    """Whether DeepSpeed searches a loss scale, so that an overflow is nothing unusual."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    return bool(getattr(config or optimizer, "dynamic_loss_scale", False))


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


def check_policy(engine: Any, core: Engine) -> None:
    """Raises AttachError if the policy needs what this engine does not have."""
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
