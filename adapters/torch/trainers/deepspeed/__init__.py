"""Heals the engine that `deepspeed.initialize` returns, with ZeRO stage 0, 1 or 2.

The basic optimizer is the torch optimizer that `engine.step()` steps. With ZeRO-1 and ZeRO-2 it
holds only this rank's flat piece of each parameter group, and DeepSpeed steps it once per group.
Its gradients in one call are therefore only a part of the step's gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.console import Console, checked_console
from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.policy.loader import resolve
from healcore.policy.overrides import check_spelling
from healcore.policy.variants import with_limit
from healcore.torch import gradients
from healcore.torch.attachment import Healing, heal_optimizer, healing_of
from healcore.torch.engines import EnforcedDecision
from healcore.torch.grad_scaler import MAX_OVERFLOWS, DroppedSteps, Overflows
from healcore.torch.healed_step import HealedStep
from healcore.torch.measurement import Measurement, Measurer, StepNorms
from healcore.torch.trainers import patched

DeepSpeedEngine: TypeAlias = Any
"""What `deepspeed.initialize` returns first. DeepSpeed need not be installed for this module."""

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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
        TypeError: an unknown keyword resembles the name of an argument.
    """
    check_spelling(overrides, heal_engine)
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
        _check(engine)
        self._engine = engine
        self.optimizer = engine.basic_optimizer
        self.per_rank = _is_sharded(engine) and engine.dp_world_size > 1
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
        sharded = _is_sharded(engine)
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
        if sharded and len(basic.param_groups) > 1:
            where = "host"  # one decision for several calls of the optimizer
        healing = heal_optimizer(
            basic,
            core,
            engine=where,
            process_group=process_group,
            measurer=partial(DeepSpeedMeasurer, engine),
            healed_step=partial(DeepSpeedStep, engine, limit),
        )
        backward = engine.backward

        @functools.wraps(backward)
        def observed(loss: Any, *args: Any, **kwargs: Any) -> Any:
            healing.observe(loss)
            return backward(loss, *args, **kwargs)

        changes = healing.healed_step.replacement.undo_stack
        changes.enter_context(patched(engine, "backward", observed))
        if limit:
            changes.enter_context(patched(engine._config, "gradient_clipping", 0.0))
            if engine.optimizer is not basic:
                changes.enter_context(patched(engine.optimizer, "clip_grad", 0.0))
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
        scale = self._scale()
        saved_scale = {}
        for name in _SCALE:
            if hasattr(scale, name):
                saved_scale[name] = getattr(scale, name)
        return {
            **self.optimizer.state_dict(),
            "masters": self._masters(),
            "scale": saved_scale,
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of `store.apply`, which has the live moments. Drops gradients.

        Writes into the live float32 weights, because ZeRO's flat buffers are views of each other.

        Args:
            state_dict: a result of `state_dict`.
        """
        basic = {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}
        self.optimizer.load_state_dict(basic)
        for live, saved in zip(self._masters(), state_dict["masters"], strict=True):
            live.copy_(saved)
        for owner, entry in ((self._scale(), "scale"), (self._engine, "counters")):
            for name, value in state_dict[entry].items():
                setattr(owner, name, value)
        self._drop_gradients()

    def _masters(self) -> list[Tensor]:
        """The basic optimizer's tensors that are not parameters of the module (float32 weights)."""
        module_ids = set(map(id, self._engine.module.parameters()))
        masters = []
        for p in gradients.parameters(self.optimizer):
            if id(p) not in module_ids:
                masters.append(p.detach())
        return masters

    def _scale(self) -> Any:
        """The object that holds the loss scale, or None."""
        optimizer = self._engine.optimizer
        config = getattr(optimizer, "loss_scale_config", None)
        if config is not None:
            return config
        return getattr(optimizer, "loss_scaler", None)

    def _drop_gradients(self) -> None:
        """Drops the gradients as DeepSpeed does after an overflow."""
        engine = self._engine
        optimizer = engine.optimizer
        engine.module.zero_grad()
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and ZeRO-2
            by_group = getattr(optimizer, name, {})
            by_group.update(dict.fromkeys(by_group))
        if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
            optimizer.clear_hp_grads()


# -- one step of DeepSpeed -------------------------------------------------------------------------


class SkippedByDeepSpeed(DroppedSteps):
    """Detects that DeepSpeed skipped a step after an overflow, without calling the optimizer.

    The hook of the optimizer does not run in such a step. Without this check, the policy would
    never judge the step.

    Args:
        engine: the DeepSpeed engine, which counts its skipped steps.

    Attributes:
        stepped: see `DroppedSteps`.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._skipped = engine.skipped_steps
        self.stepped = False

    def take(self) -> bool:
        """Whether a step was skipped since the last call.

        A rollback lowers DeepSpeed's count, which does not mean a skipped step.
        """
        before = self._skipped
        self._skipped = self._engine.skipped_steps
        return self._skipped > before


class DeepSpeedMeasurer(Measurer):
    """Measures a step of DeepSpeed. With ZeRO the norm is over all groups and ranks.

    A rank's optimizer has only a piece of each group then, and is called once for each group. No
    call sees the gradients of the step, so that DeepSpeed's own norm is taken.

    Args:
        engine: the DeepSpeed engine.
        *args: arguments of `Measurer`.
    """

    may_clip_as_torch = False  # DeepSpeed clips by arithmetic of its own

    def __init__(self, engine: DeepSpeedEngine, *args: Any) -> None:
        super().__init__(*args)
        self._deepspeed = engine.optimizer
        self._sharded = _is_sharded(engine)
        self.dropped = SkippedByDeepSpeed(engine)
        # Overflows are normal under a dynamic loss scale. Otherwise the gradients are not finite.
        config = getattr(engine.optimizer, "loss_scale_config", None) or engine.optimizer
        max_overflows = 0
        if getattr(config, "dynamic_loss_scale", False):
            max_overflows = MAX_OVERFLOWS
        self.overflows = Overflows(self.home, max_overflows)

    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        """Measures a step as `Measurer.measure` does, with DeepSpeed's norm under ZeRO.

        Args:
            *args: as for `Measurer.measure`.
            **kwargs: as for `Measurer.measure`.

        Returns:
            What this rank measures; `grad_norm` is NaN if DeepSpeed found the norm not finite.
        """
        measured = super().measure(*args, **kwargs)
        if not self._sharded:
            return measured
        # DeepSpeed computes this norm before it calls the basic optimizer: reduced over the ranks,
        # without the loss scale, before clipping. get_global_grad_norm() is one step behind.
        norm = torch.as_tensor(self._deepspeed._global_grad_norm, dtype=torch.float32)
        norm = gradients.to_device(norm, self.home)
        # DeepSpeed sets -1 if the norm is not finite.
        norm = norm.masked_fill(norm < 0, math.nan)
        return measured._replace(signals=measured.signals._replace(grad_norm=norm))


class DeepSpeedStep(HealedStep):
    """Judges once per step of DeepSpeed, and enforces the decision in every parameter group.

    Args:
        engine: the DeepSpeed engine.
        adopted_limit: DeepSpeed's max gradient norm, which the policy enforces instead, or None.
        *args: arguments of `HealedStep`.
    """

    may_reset_moments = False  # DeepSpeed refers to the moment tensors

    def __init__(self, engine: DeepSpeedEngine, adopted_limit: float | None, *args: Any) -> None:
        super().__init__(*args)
        self.adopted_limit = adopted_limit
        self._first = gradients.parameters(self.optimizer)[0]
        self._group_decision: EnforcedDecision | None = None
        self._sharded = _is_sharded(engine)

    @torch.no_grad()
    def _judge(self) -> None:
        """Judges the first group of a step, and enforces the same decision in the other groups.

        With ZeRO DeepSpeed calls the optimizer once for each group, with only this group in it.
        """
        params = gradients.parameters(self.optimizer)
        if not self._sharded or params[0] is self._first:
            super()._judge()
            self._group_decision = self._current.enforced
        elif self._group_decision is not None:
            self._current.enforced = self._group_decision
            self.enforcer.enforce(params, self._group_decision, self.enforcer.amp_flags()[0])

    def _report(self, norms: StepNorms) -> None:
        """See `HealedStep._report`."""
        if self._sharded:  # a norm of a flat piece belongs to no single parameter
            norms = StepNorms([], [], None)
        super()._report(norms)


# -- what cannot be healed -------------------------------------------------------------------------


def _is_sharded(engine: DeepSpeedEngine) -> bool:
    """Whether each rank's optimizer holds flat pieces of all parameters (ZeRO-1, ZeRO-2, BF16)."""
    return hasattr(engine.optimizer, "partition_count")


def _check(engine: DeepSpeedEngine) -> None:
    """Raises AttachError unless this engine can be healed."""
    if not _is_deepspeed_engine(engine):
        raise AttachError(
            f"heal_engine takes a DeepSpeed engine, got {type(engine).__name__}: pass the first "
            "result of deepspeed.initialize, or use attach(optimizer) without DeepSpeed"
        )
    stage = engine.zero_optimization_stage()
    zero = engine._config.zero_config
    parallel = getattr(engine.mpu, "get_model_parallel_world_size", lambda: 1)()
    float16 = False
    for owner in (engine, engine.optimizer):
        for name in ("torch_autocast_z0_gradscaler", "torch_autocast_gradscaler"):
            if getattr(owner, name, None):
                float16 = True
    offloads = bool(zero.offload_optimizer or zero.offload_param or engine.zenflow)
    without_norm = stage in (1, 2) and not zero.compute_grad_norm
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
        "with model parallelism each rank has the norm of its part only": parallel > 1,
        "torch_autocast with float16 has a GradScaler per group; use bf16": float16,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise AttachError(f"this DeepSpeed engine cannot be healed: {obstacle}")


def _is_deepspeed_engine(engine: DeepSpeedEngine) -> bool:
    """Whether an object is a DeepSpeed engine, by its name: DeepSpeed need not be installed."""
    for kind in type(engine).__mro__:
        if kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed."):
            return True
    return False


def _check_policy(engine: DeepSpeedEngine, core: Engine, limit: float | None) -> None:
    """Raises AttachError if the policy needs something that this engine lacks."""
    flattened = _is_sharded(engine) or hasattr(engine.optimizer, "fp32_groups_flat")
    if core.per_tensor and flattened:
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
