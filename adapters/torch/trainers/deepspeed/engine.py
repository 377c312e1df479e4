"""`heal_engine` and `engine_state`: heal a loop with a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.console import Console, checked_console
from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.policy.loader import resolve, with_limit
from healcore.torch import gradients
from healcore.torch.attachment import Healing, heal_optimizer, healing_of
from healcore.torch.trainers.deepspeed.step import DeepSpeedMeasurer, DeepSpeedStep, is_sharded
from healcore.torch.trainers.hook import patched

DeepSpeedEngine: TypeAlias = Any
"""What `deepspeed.initialize` returns first. DeepSpeed need not be installed for this module."""

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Public attributes of a DeepSpeed engine, with which it counts."""
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of the owner of a loss scale, which has only some of them."""


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


class DeepSpeedOptimizer(Optimizer):
    """The part of the state that DeepSpeed steps: moments, float32 weights, loss scale, counters.

    A rollback writes into the live tensors, because ZeRO's flat buffers are views of each other.
    DeepSpeed's own `load_checkpoint` reads from disk and rebuilds parts of its engine.

    Args:
        engine: the DeepSpeed engine. AttachError if it cannot be healed.

    Attributes:
        optimizer: the basic optimizer.
        per_rank: whether each rank has its own pieces of the weights and moments.
        trainer_limit: DeepSpeed's max gradient norm (`gradient_clipping`), or None.
        run_settings: settings of the trainer that owns the loop, or None for a loop of the user.
    """

    run_settings: dict[str, Any] | None = None

    def __init__(self, engine: DeepSpeedEngine) -> None:
        # super().__init__() is not called, because the basic optimizer has the hooks.
        _check_engine(engine)
        self._engine = engine
        self.optimizer = engine.basic_optimizer
        self.per_rank = is_sharded(engine) and engine.dp_world_size > 1
        healing = healing_of(self.optimizer)
        if healing is not None and isinstance(healing.healed_step, DeepSpeedStep):
            self.trainer_limit = healing.healed_step.adopted_limit
        else:
            self.trainer_limit = float(engine.gradient_clipping() or 0.0) or None

    def attach_with(self, core: Engine, *, process_group: Any = "auto", **options: Any) -> Healing:
        """Heals the DeepSpeed engine. The Healer calls this method instead of `attach`.

        Args:
            core: the policy's engine.
            process_group: as for `attach`.
            **options: other options of `attach`. Each has to be None.

        Returns:
            The same handle as from `attach`. `detach()` restores the DeepSpeed engine.

        Raises:
            AttachError: an option is given, or the policy needs something that this DeepSpeed
                engine lacks.
        """
        engine = self._engine
        basic = self.optimizer
        limit = self.trainer_limit
        if core.mode == "observe":
            limit = None
        unknown = [name for name, value in options.items() if value is not None]
        if unknown:
            raise AttachError(
                f"a DeepSpeed engine takes no attach={{{min(unknown)!r}: ...}}: this option "
                "follows from DeepSpeed's config; omit it"
            )
        _check_policy(engine, core, limit)
        where: Literal["auto", "host"] = "auto"
        if is_sharded(engine) and len(basic.param_groups) > 1:
            where = "host"  # one decision for several calls of the optimizer
        healing = heal_optimizer(
            basic,
            core,
            engine=where,
            process_group=process_group,
            measurer=functools.partial(DeepSpeedMeasurer, engine),
            healed_step=functools.partial(DeepSpeedStep, engine, limit),
        )
        change = healing.healed_step.undo_stack.enter_context
        backward = engine.backward

        @functools.wraps(backward)
        def observed(loss: Any, *args: Any, **kwargs: Any) -> Any:
            healing.observe(loss)
            return backward(loss, *args, **kwargs)

        change(patched(engine, "backward", observed))
        if limit:
            change(patched(engine._config, "gradient_clipping", 0.0))
            if engine.optimizer is not basic:  # has a copy of the limit
                change(patched(engine.optimizer, "clip_grad", 0.0))
        return healing

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the basic optimizer.

        With ZeRO each group has one parameter, which is this rank's flat piece of the group.
        """
        return self.optimizer.param_groups

    @property
    def mid_accumulation(self) -> bool:
        """Whether gradients have been accumulated since the last step.

        The Healer does not save then: a restart would lose these gradients.
        """
        engine = self._engine
        if not engine.managed_gradient_accumulation():
            return engine._unmanaged_backward_count > 0
        return engine.micro_steps % engine.gradient_accumulation_steps() != 0

    def state_dict(self) -> dict[str, Any]:
        """The state, with references to the live tensors.

        Returns:
            The state of the basic optimizer ("state", "param_groups"); "masters": the float32
            weights, a list of tensors; "scale": the loss scale and its counts by attribute, empty
            without a loss scale; "counters": the DeepSpeed engine's counts by attribute.
        """
        scale = self._scale_owner()
        return {
            **self.optimizer.state_dict(),
            "masters": self._masters(),
            "scale": {name: getattr(scale, name) for name in _SCALE if hasattr(scale, name)},
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of `store.apply`, which has the live moments. Drops gradients.

        Writes into the live float32 weights, because ZeRO's flat buffers are views of each other.

        Args:
            state_dict: a result of `state_dict`.
        """
        engine, optimizer = self._engine, self._engine.optimizer
        basic = {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}
        self.optimizer.load_state_dict(basic)
        for live, saved in zip(self._masters(), state_dict["masters"], strict=True):
            live.copy_(saved)
        for name, value in state_dict["scale"].items():
            setattr(self._scale_owner(), name, value)
        for name, value in state_dict["counters"].items():
            setattr(engine, name, value)
        # As DeepSpeed drops gradients after an overflow.
        engine.module.zero_grad()
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and ZeRO-2
            by_group = getattr(optimizer, name, {})
            by_group.update(dict.fromkeys(by_group))
        if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
            optimizer.clear_hp_grads()

    def _masters(self) -> list[Tensor]:
        """The basic optimizer's tensors that are not parameters of the module (float32 weights)."""
        module_ids = set(map(id, self._engine.module.parameters()))
        masters = []
        for p in gradients.parameters(self.optimizer):
            if id(p) not in module_ids:
                masters.append(p.detach())
        return masters

    def _scale_owner(self) -> Any:
        """The object that holds the loss scale, or None."""
        optimizer = self._engine.optimizer
        owner = getattr(optimizer, "loss_scale_config", None)
        return owner or getattr(optimizer, "loss_scaler", None)


def _check_engine(engine: DeepSpeedEngine) -> None:
    """Raises AttachError unless this engine can be healed."""
    # By the name of the class, because DeepSpeed need not be installed.
    if not any(kind.__name__ == "DeepSpeedEngine" for kind in type(engine).__mro__):
        raise AttachError(
            f"heal_engine takes a DeepSpeed engine, got {type(engine).__name__}: pass the first "
            "result of deepspeed.initialize, or use attach(optimizer) without DeepSpeed"
        )
    stage = engine.zero_optimization_stage()
    zero = engine._config.zero_config
    offloads = bool(zero.offload_optimizer or zero.offload_param or engine.zenflow)
    float16 = getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(
        engine.optimizer, "torch_autocast_gradscaler", None
    )
    without_norm = stage in (1, 2) and not zero.compute_grad_norm
    ranks_of_model = getattr(engine.mpu, "get_model_parallel_world_size", None)
    model_parallel = ranks_of_model is not None and ranks_of_model() > 1
    scaled_norm = stage == 0 and engine.fp16_enabled()
    obstacles = {
        "a pipeline engine steps inside train_batch()": hasattr(engine, "train_batch"),
        "it has no optimizer": engine.basic_optimizer is None,
        "ZeRO-3 never has the whole step at once; use stage 1 or 2, or FSDP2": stage >= 3,
        "with fp16 and ZeRO stage 0 DeepSpeed 0.19 divides the gradients by its loss scale but "
        "does not multiply the loss by it, so the norm is wrong; use stage 1": scaled_norm,
        "with offloading the update runs outside of optimizer.step()": offloads,
        "zero_optimization.compute_grad_norm is false": without_norm,
        "the experts' gradients are on some ranks only": engine.has_moe_layers,
        "with model parallelism each rank has the norm of its part only": model_parallel,
        "torch_autocast with float16 has a GradScaler per group; use bf16": float16,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise AttachError(f"this DeepSpeed engine cannot be healed: {obstacle}")


def _check_policy(engine: DeepSpeedEngine, core: Engine, limit: float | None) -> None:
    """Raises AttachError if the policy needs something that this engine lacks."""
    is_flattened = is_sharded(engine) or hasattr(engine.optimizer, "fp32_groups_flat")
    if core.per_tensor and is_flattened:
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
