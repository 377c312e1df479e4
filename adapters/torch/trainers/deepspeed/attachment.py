"""Defines `heal_engine`, which heals a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from healcore.core.engine import Engine
from healcore.torch.attachment import heal_optimizer
from healcore.torch.healing import Healing
from healcore.torch.trainers.deepspeed import supported
from healcore.torch.trainers.deepspeed.hooks import EngineHooks, EngineMeasurer

if TYPE_CHECKING:
    from healcore.policy import Overrides, PolicyLike


def heal_engine(
    engine: nn.Module, policy: PolicyLike = "default", **overrides: Unpack[Overrides]
) -> Healing:
    """Heals a DeepSpeed engine: the policy judges every step, then clips it or skips it.

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        heal = heal_engine(engine, "default")

    Losses are taken from `engine.backward(loss)`; the loop stays as it is. With ZeRO-1 and ZeRO-2
    the norm is that over all groups and ranks. For rollbacks pass `engine_state(engine)` to a
    `Healer`.

    DeepSpeed's `gradient_clipping` is taken over: the policy sees the norm before it, and it stays
    in force after the policy. A step that DeepSpeed skips itself is judged when the next loss is
    observed, or by the Healer before: as a non-finite one, unless a dynamic loss scale is being
    searched for.

    Args:
        engine: what `deepspeed.initialize` returns first.
        policy: as for `attach`.
        **overrides: as for `attach`.

    Returns:
        The handle, as of `attach`; `detach()` gives the engine back as it was.

    Raises:
        AttachError: a pipeline engine, ZeRO-3, offloading, experts, model parallelism, or what
            `attach` does not take. Nothing has changed then.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    from healcore.policy import engine_of  # here: `import healcore.torch` loads no pydantic

    return heal_basic_optimizer(engine, lambda: engine_of(policy, overrides))


def heal_basic_optimizer(
    engine: Any, core_of: Callable[[], Engine], process_group: Any = "auto"
) -> Healing:
    """`heal_engine` with an engine of healcore's instead of a policy."""
    supported.check(engine)
    core = core_of()
    supported.check_policy(engine, core)
    basic, limit = engine.basic_optimizer, float(engine.gradient_clipping() or 0.0)
    takes_over = limit > 0.0 and core.mode != "observe"
    # What is enforced outside of one call of the optimizer has to be known on the host.
    needs_host = takes_over or (supported.is_sharded(engine) and len(basic.param_groups) > 1)
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
    if takes_over:
        hooks.limit = limit
        _set_clipping(engine, 0.0)
    restore_backward = _observe_backward(engine, healing)

    def undo() -> None:
        restore_backward()
        if takes_over:
            _set_clipping(engine, limit)

    hooks.undo = undo
    return healing


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
