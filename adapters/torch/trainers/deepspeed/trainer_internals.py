"""Every private name of DeepSpeed that healcore uses, and nothing else.

The rest of this folder uses public names only. A new version of DeepSpeed that renames one of these
is repaired here. DeepSpeed 0.19.8 has all of them. The optimizers of DeepSpeed are not documented,
so their names count as private, also those without an underscore.

name | owner | used for
---|---|---
`_config` | engine | its clipping; whether ZeRO offloads, and measures the norm
`_unmanaged_backward_count` | engine | gradients since the last step, if the program accumulates
`torch_autocast_z0_gradscaler` | engine | whether a GradScaler scales the loss
`torch_autocast_gradscaler` | every optimizer | the same
`clip_grad` | every optimizer | its clipping
`_global_grad_norm` | ZeRO, BF16 | the norm over all groups and ranks, before clipping
`partition_count` | ZeRO, BF16 | whether each rank has pieces of the parameters
`fp32_groups_flat` | FP16 | whether each group is one flat tensor
`loss_scale_config` | FP16 | the loss scale and its counts (`_SCALE`)
`loss_scaler` | ZeRO | the same
`dynamic_loss_scale` | ZeRO, `loss_scale_config` | whether overflows are normal
`averaged_gradients`, `all_grad_tensors` | ZeRO | gradients, which a rollback drops
`clear_hp_grads` | BF16 | drops the float32 gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import Tensor

from healcore.torch.trainers.hook import patched

DeepSpeedEngine: TypeAlias = Any
"""What `deepspeed.initialize` returns first. DeepSpeed need not be installed for this module."""

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of the owner of a loss scale, which has only some of them."""


# -- the kind of an engine -------------------------------------------------------------------------


def is_deepspeed_engine(engine: object) -> bool:
    """Whether an object is a DeepSpeed engine, by its name: DeepSpeed need not be installed."""
    for kind in type(engine).__mro__:
        if kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed."):
            return True
    return False


def is_sharded(engine: DeepSpeedEngine) -> bool:
    """Whether each rank's optimizer holds flat pieces of all parameters (ZeRO-1, ZeRO-2, BF16)."""
    return hasattr(engine.optimizer, "partition_count")


def is_flattened(engine: DeepSpeedEngine) -> bool:
    """Whether each parameter group is stepped as one flat tensor, or as a piece of it."""
    return is_sharded(engine) or hasattr(engine.optimizer, "fp32_groups_flat")


def offloads(engine: DeepSpeedEngine) -> bool:
    """Whether weights or moments are offloaded, and updated outside of the optimizer."""
    zero = engine._config.zero_config
    return bool(zero.offload_optimizer or zero.offload_param or engine.zenflow)


def measures_norm(engine: DeepSpeedEngine) -> bool:
    """Whether ZeRO measures the norm of the gradients (`compute_grad_norm` of its config)."""
    return engine._config.zero_config.compute_grad_norm


def has_grad_scaler(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed's autocast scales the loss with a GradScaler, as it does with float16."""
    for owner in (engine, engine.optimizer):
        for name in ("torch_autocast_z0_gradscaler", "torch_autocast_gradscaler"):
            if getattr(owner, name, None):
                return True
    return False


def model_parallel_size(engine: DeepSpeedEngine) -> int:
    """Number of ranks that share the layers of one model; 1 without model parallelism."""
    size = getattr(engine.mpu, "get_model_parallel_world_size", None)
    if size is None:
        return 1
    return size()


# -- one step --------------------------------------------------------------------------------------


@contextmanager
def without_clipping(engine: DeepSpeedEngine) -> Iterator[None]:
    """Makes DeepSpeed clip no gradients until the block ends.

    An optimizer of DeepSpeed's own, around the basic optimizer, has a copy of the engine's limit.

    Args:
        engine: the DeepSpeed engine.
    """
    with ExitStack() as stack:
        stack.enter_context(patched(engine._config, "gradient_clipping", 0.0))
        if engine.optimizer is not engine.basic_optimizer:
            stack.enter_context(patched(engine.optimizer, "clip_grad", 0.0))
        yield


def global_norm(engine: DeepSpeedEngine) -> Tensor | float:
    """The norm of the gradients of the step that ZeRO is taking; -1 if the norm is not finite.

    ZeRO computes this norm before it calls the basic optimizer: reduced over the ranks, without the
    loss scale, before clipping. The norm that a DeepSpeed engine returns is one step behind.
    """
    return engine.optimizer._global_grad_norm


def is_accumulating(engine: DeepSpeedEngine) -> bool:
    """Whether gradients have been accumulated since the last step."""
    if not engine.managed_gradient_accumulation():
        return engine._unmanaged_backward_count > 0
    return engine.micro_steps % engine.gradient_accumulation_steps() != 0


def drop_gradients(engine: DeepSpeedEngine) -> None:
    """Drops the gradients as DeepSpeed does after an overflow."""
    optimizer = engine.optimizer
    engine.module.zero_grad()
    optimizer.zero_grad()
    for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and ZeRO-2
        by_group = getattr(optimizer, name, {})
        by_group.update(dict.fromkeys(by_group))
    if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
        optimizer.clear_hp_grads()


# -- the loss scale --------------------------------------------------------------------------------


def searches_loss_scale(engine: DeepSpeedEngine) -> bool:
    """Whether the loss scale is dynamic, so that overflows are normal."""
    optimizer = engine.optimizer
    owner = getattr(optimizer, "loss_scale_config", None) or optimizer
    return getattr(owner, "dynamic_loss_scale", False)


def loss_scale(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The loss scale and its counts, by attribute; empty without a loss scale."""
    owner = _loss_scale_owner(engine)
    return {name: getattr(owner, name) for name in _SCALE if hasattr(owner, name)}


def set_loss_scale(engine: DeepSpeedEngine, values: Mapping[str, Any]) -> None:
    """Sets the loss scale and its counts, which a rollback restores.

    Args:
        engine: the DeepSpeed engine.
        values: a result of `loss_scale`.
    """
    owner = _loss_scale_owner(engine)
    for name, value in values.items():
        setattr(owner, name, value)


def _loss_scale_owner(engine: DeepSpeedEngine) -> Any:
    """The object that holds the loss scale, or None."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        return config
    return getattr(optimizer, "loss_scaler", None)
