"""Raises AttachError for a DeepSpeed engine or a policy that cannot be healed."""

from __future__ import annotations

from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.torch.trainers.deepspeed import trainer_internals as internals
from healcore.torch.trainers.deepspeed.trainer_internals import DeepSpeedEngine


def check_engine(engine: DeepSpeedEngine) -> None:
    """Raises AttachError unless this engine can be healed."""
    if not internals.is_deepspeed_engine(engine):
        raise AttachError(
            f"heal_engine takes a DeepSpeed engine, got {type(engine).__name__}: pass the first "
            "result of deepspeed.initialize, or use attach(optimizer) without DeepSpeed"
        )
    stage = engine.zero_optimization_stage()
    float16 = internals.has_grad_scaler(engine)
    without_norm = stage in (1, 2) and not internals.measures_norm(engine)
    model_parallel = internals.model_parallel_size(engine) > 1
    scaled_norm = stage == 0 and engine.fp16_enabled()
    obstacles = {
        "a pipeline engine steps inside train_batch()": hasattr(engine, "train_batch"),
        "it has no optimizer": engine.basic_optimizer is None,
        "ZeRO-3 never has the whole step at once; use stage 1 or 2, or FSDP2": stage >= 3,
        "with fp16 and ZeRO stage 0 DeepSpeed 0.19 divides the gradients by its loss scale but "
        "does not multiply the loss by it, so the norm is wrong; use stage 1": scaled_norm,
        "with offloading the update runs outside of optimizer.step()": internals.offloads(engine),
        "zero_optimization.compute_grad_norm is false": without_norm,
        "the experts' gradients are on some ranks only": engine.has_moe_layers,
        "with model parallelism each rank has the norm of its part only": model_parallel,
        "torch_autocast with float16 has a GradScaler per group; use bf16": float16,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise AttachError(f"this DeepSpeed engine cannot be healed: {obstacle}")


def check_policy(engine: DeepSpeedEngine, core: Engine, limit: float | None) -> None:
    """Raises AttachError if the policy needs something that this engine lacks."""
    if core.per_tensor and internals.is_flattened(engine):
        raise AttachError(
            "this policy clips each tensor by its own history, and this DeepSpeed engine steps "
            'flattened groups: use clip={"kind": "zclip"}, or ZeRO stage 0'
        )
    max_norm = None
    rule = core.config.clip
    if rule is not None and rule.limits_every_step:
        max_norm = rule.max_norm
    if limit and (max_norm is None or float(max_norm) > limit * (1 + 1e-6)):
        raise AttachError(
            f"gradient_clipping = {limit:g} clips before the policy can measure the norm, and this "
            "policy cannot hold the limit: set gradient_clipping to 0 in DeepSpeed's config"
        )
