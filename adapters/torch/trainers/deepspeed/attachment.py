"""Defines `heal_engine`, which heals a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from healcore.console import Console, checked
from healcore.core.engine import Engine
from healcore.torch.attachment import heal_optimizer, healing_of
from healcore.torch.healing import Healing
from healcore.torch.trainers.deepspeed import supported
from healcore.torch.trainers.deepspeed.hooks import EngineHooks, EngineMeasurer

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
    the norm is that over all groups and ranks. For rollbacks pass `engine_state(engine)` to a
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
    """`heal_engine` with an engine of healcore's instead of a policy."""
    supported.check(engine)
    core = core_of()
    supported.check_policy(engine, core)
    basic, limit = engine.basic_optimizer, gradient_clipping(engine)
    taken_over = None if core.mode == "observe" else limit
    enforced_after = taken_over if taken_over and not _has_limit(core, taken_over) else 0.0
    # What is enforced outside of one call of the optimizer has to be known on the host.
    needs_host = enforced_after > 0.0 or (
        supported.is_sharded(engine) and len(basic.param_groups) > 1
    )
    healing = heal_optimizer(
        basic,
        lambda: core,
        engine="host" if needs_host else "auto",
        process_group=process_group,
        measurer=partial(EngineMeasurer, engine),
        hooks=partial(EngineHooks, engine),
    )
    hooks = healing.hooks
    assert isinstance(hooks, EngineHooks)
    hooks.taken_over, hooks.limit = taken_over, enforced_after
    if taken_over:
        _set_clipping(engine, 0.0)
    restore_backward = _observe_backward(engine, healing)

    def undo() -> None:
        restore_backward()
        if taken_over:
            _set_clipping(engine, taken_over)

    hooks.undo = undo
    return healing


def gradient_clipping(engine: Any) -> float | None:
    """The norm that DeepSpeed clips at, also where it is taken over; None: it does not clip."""
    healing = healing_of(engine.basic_optimizer)
    if healing is not None and isinstance(healing.hooks, EngineHooks):
        return healing.hooks.taken_over
    return float(engine.gradient_clipping() or 0.0) or None


def _has_limit(core: Engine, limit: float) -> bool:
    """Whether the policy never clips less than at `limit`, but for rounding."""
    rule, config = core.config.clip or ("none", None)
    own = None if rule == "adagc" else getattr(config, "max_norm", None)  # adagc: in warm-up only
    return own is not None and float(own) <= limit * (1 + 1e-6)


def _set_clipping(engine: Any, limit: float) -> None:
    """Sets DeepSpeed's own limit; 0: none. Its wrapper of the optimizer has a copy."""
    engine._config.gradient_clipping = limit
    if engine.optimizer is not engine.basic_optimizer:
        engine.optimizer.clip_grad = limit


def _observe_backward(engine: Any, healing: Healing) -> Callable[[], None]:
    """Makes `engine.backward` report its loss; returns what undoes that."""
    original = engine.backward

    @functools.wraps(original)
    def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        healing.observe(loss)
        return original(loss, *args, **kwargs)

    engine.backward = backward

    def undo() -> None:
        if engine.__dict__.get("backward") is backward:
            del engine.backward

    return undo
