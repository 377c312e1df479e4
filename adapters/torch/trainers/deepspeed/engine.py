"""`heal_engine` and `engine_state`: heal a loop with a DeepSpeed engine."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from healcore.console import Console, checked_console
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.policy.loader import resolve, with_limit
from healcore.torch.attachment import Healing
from healcore.torch.trainers.deepspeed.optimizer import DeepSpeedOptimizer


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
        engine: the DeepSpeed engine, first result of `deepspeed.initialize`.
        policy: as for `attach`.
        console: as for `attach`.
        **overrides: as for `attach`.

    Returns:
        The same handle as from `attach`. `detach()` restores the DeepSpeed engine.

    Raises:
        AttachError: a pipeline engine, ZeRO-3, offloading, experts, model parallelism, a policy
            that cannot hold DeepSpeed's limit, or anything that `attach` refuses. The DeepSpeed
            engine is unchanged.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """
    printed = checked_console(console)
    part = DeepSpeedOptimizer(engine)
    core = engine_of(with_limit(resolve(policy, overrides), part.trainer_limit))
    healing = part.attach_with(core)
    healing.healed_step.attach_log.console = printed
    return healing


def engine_state(engine: nn.Module) -> dict[str, Any]:
    """The `state` of a Healer for a DeepSpeed engine.

        with Healer("default", state=engine_state(engine), store="checkpoints") as healer:
            for batch in healer.batches(loader):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()

    The Healer also heals this engine, unless `heal_engine` was called before. Checkpoints hold the
    module, the basic optimizer, DeepSpeed's float32 copies of the weights, its loss scale and
    counters, and the scheduler. With ZeRO each rank saves its own pieces, so a resume needs the
    same number of ranks.

    Args:
        engine: the DeepSpeed engine, first result of `deepspeed.initialize`.

    Returns:
        Name -> part. Other parts can be added: `{**engine_state(engine), "ema": ema}`.

    Raises:
        AttachError: as for `heal_engine`.
    """
    deepspeed: Any = engine
    parts = {"model": deepspeed.module, "optimizer": DeepSpeedOptimizer(engine)}
    if deepspeed.lr_scheduler is not None:
        parts["scheduler"] = deepspeed.lr_scheduler
    return parts
