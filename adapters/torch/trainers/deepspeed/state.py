"""Defines `engine_state`, the state of a DeepSpeed engine that a Healer saves and restores.

A rollback writes into the live tensors, because ZeRO's flat buffers are views of each other.
DeepSpeed's own `load_checkpoint` reads from disk and rebuilds parts of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.trainers.deepspeed.attachment import (
    check,
    gradient_clipping,
    heal_basic_optimizer,
)
from healcore.torch.trainers.deepspeed.hooks import is_sharded

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_state(engine: nn.Module) -> dict[str, Any]:
    """The `state` of a Healer for a DeepSpeed engine.

        with Healer("default", state=engine_state(engine), store="checkpoints") as healer:
            for batch in healer.batches(loader):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()

    The Healer also heals the engine, unless `heal_engine` was called before. Checkpoints hold the
    module, the basic optimizer, DeepSpeed's float32 copies of the weights, its loss scale and
    counters, and the scheduler. With ZeRO each rank saves its own pieces, so a resume needs the
    same number of ranks.

    Args:
        engine: the engine, first result of `deepspeed.initialize`.

    Returns:
        Name -> part. Other parts can be added: `{**engine_state(engine), "ema": ema}`.

    Raises:
        AttachError: as for `heal_engine`.
    """
    deepspeed: Any = engine
    check(deepspeed)
    parts: dict[str, Any] = {
        "model": deepspeed.module,
        "optimizer": BasicOptimizer(deepspeed),
        "deepspeed": EngineParts(deepspeed),
    }
    if deepspeed.lr_scheduler is not None:
        parts["scheduler"] = deepspeed.lr_scheduler
    return parts


class BasicOptimizer(Optimizer):
    """Wraps the basic optimizer of an engine as a part of the state. `step` is never called.

    Attributes:
        per_rank: whether the moments differ between ranks.
        trainer_limit: DeepSpeed's max gradient norm (`gradient_clipping`), or None.
    """

    def __init__(self, engine: Any) -> None:
        # super().__init__() is not called, because the wrapped optimizer has the hooks.
        self._engine = engine
        self.optimizer = engine.basic_optimizer
        self.per_rank = is_sharded(engine) and engine.dp_world_size > 1
        self.trainer_limit = gradient_clipping(engine)

    def attach_with(self, core: Engine, **options: Any) -> Healing:
        """Heals the engine; the driver calls it instead of `attach`."""
        group = options.pop("process_group", "auto")
        unknown = sorted(name for name, value in options.items() if value is not None)
        if unknown:
            raise AttachError(
                f"a DeepSpeed engine takes no attach={{{unknown[0]!r}: ...}}: this option follows "
                "from DeepSpeed's config; omit it"
            )
        return heal_basic_optimizer(self._engine, core, group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the basic optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state into the existing tensors, because DeepSpeed refers to them."""
        before = {p: dict(moments) for p, moments in self.optimizer.state.items()}
        self.optimizer.load_state_dict(state_dict)
        for p, moments in self.optimizer.state.items():
            for name, old in before.get(p, {}).items():
                new = moments.get(name)
                if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
                    moments[name] = old.copy_(new)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the basic optimizer."""
        return self.optimizer.param_groups


class EngineParts:
    """Float32 weights, loss scale and counters of an engine, as a part of the state.

    Attributes:
        per_rank: whether each rank has its own pieces of the weights.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.per_rank = is_sharded(engine) and engine.dp_world_size > 1

    @property
    def mid_accumulation(self) -> bool:
        """Whether gradients have been accumulated since the last step."""
        engine = self._engine
        if not engine.managed_gradient_accumulation():
            return engine._unmanaged_backward_count > 0
        return engine.micro_steps % engine.gradient_accumulation_steps() != 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, with references to the live tensors."""
        scale = self._scale()
        return {
            "masters": self._masters(),
            "scale": {name: getattr(scale, name) for name in SCALE if hasattr(scale, name)},
            "counters": {name: getattr(self._engine, name) for name in COUNTERS},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state into the live tensors, and drops accumulated gradients."""
        for live, saved in zip(self._masters(), state["masters"], strict=True):
            live.copy_(saved)
        scale = self._scale()
        for name, value in state["scale"].items():
            setattr(scale, name, value)
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)
        self._drop_gradients()

    def _masters(self) -> list[Tensor]:
        """The optimizer's tensors that are not parameters of the module (float32 weights)."""
        module_ids = {id(p) for p in self._engine.module.parameters()}
        params = gradients.parameters(self._engine.basic_optimizer)
        return [p.detach() for p in params if id(p) not in module_ids]

    def _scale(self) -> Any:
        """The object that holds the loss scale, or None."""
        optimizer = self._engine.optimizer
        config = getattr(optimizer, "loss_scale_config", None)
        return getattr(optimizer, "loss_scaler", None) if config is None else config

    def _drop_gradients(self) -> None:
        """Drops the gradients as DeepSpeed does after an overflow."""
        engine, optimizer = self._engine, self._engine.optimizer
        engine.module.zero_grad()
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and ZeRO-2
            gradients_by_group = getattr(optimizer, name, {})
            for group in gradients_by_group:
                gradients_by_group[group] = None
        if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
            optimizer.clear_hp_grads()
