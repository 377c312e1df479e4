"""`DeepSpeedOptimizer`: what a DeepSpeed engine steps, as a part of the Healer's state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.torch import gradients
from healcore.torch.attachment import Healing, heal_optimizer, healing_of
from healcore.torch.trainers.deepspeed import trainer_internals as internals
from healcore.torch.trainers.deepspeed.checks import check_engine, check_policy
from healcore.torch.trainers.deepspeed.step import DeepSpeedMeasurer, DeepSpeedStep
from healcore.torch.trainers.deepspeed.trainer_internals import DeepSpeedEngine
from healcore.torch.trainers.hook import patched

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Public attributes of a DeepSpeed engine, with which it counts."""


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
        check_engine(engine)
        self._engine = engine
        self.optimizer = engine.basic_optimizer
        self.per_rank = internals.is_sharded(engine) and engine.dp_world_size > 1
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
        check_policy(engine, core, limit)
        where: Literal["auto", "host"] = "auto"
        if internals.is_sharded(engine) and len(basic.param_groups) > 1:
            where = "host"  # one decision for several calls of the optimizer
        healing = heal_optimizer(
            basic,
            core,
            engine=where,
            process_group=process_group,
            measurer=partial(DeepSpeedMeasurer, engine),
            healed_step=partial(DeepSpeedStep, engine, limit),
        )
        changes = healing.healed_step.undo_stack
        changes.enter_context(patched(engine, "backward", _observed(engine.backward, healing)))
        if limit:
            changes.enter_context(internals.without_clipping(engine))
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
        return internals.is_accumulating(self._engine)

    def state_dict(self) -> dict[str, Any]:
        """The state, with references to the live tensors.

        Returns:
            The state of the basic optimizer ("state", "param_groups"); "masters": the float32
            weights, a list of tensors; "scale": the loss scale and its counts by attribute, empty
            without a loss scale; "counters": the DeepSpeed engine's counts by attribute.
        """
        return {
            **self.optimizer.state_dict(),
            "masters": self._masters(),
            "scale": internals.loss_scale(self._engine),
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
        internals.set_loss_scale(self._engine, state_dict["scale"])
        for name, value in state_dict["counters"].items():
            setattr(self._engine, name, value)
        internals.drop_gradients(self._engine)

    def _masters(self) -> list[Tensor]:
        """The basic optimizer's tensors that are not parameters of the module (float32 weights)."""
        module_ids = set(map(id, self._engine.module.parameters()))
        masters = []
        for p in gradients.parameters(self.optimizer):
            if id(p) not in module_ids:
                masters.append(p.detach())
        return masters


def _observed(backward: Callable[..., Any], healing: Healing) -> Callable[..., Any]:
    """DeepSpeed's `backward`, which also observes the loss."""

    @functools.wraps(backward)
    def observed(loss: Any, *args: Any, **kwargs: Any) -> Any:
        healing.observe(loss)
        return backward(loss, *args, **kwargs)

    return observed
