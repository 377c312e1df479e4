"""Defines `engine_state`, which a Healer saves and restores of a DeepSpeed engine.

DeepSpeed's own `load_checkpoint` reads from disk and rebuilds parts. A rollback writes into the
live tensors instead, because ZeRO's flat buffers are views of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.torch import gradients
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
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

    The Healer heals the engine, as by `heal_engine`, unless that was called before. Checkpoints
    hold the module, the basic optimizer, DeepSpeed's float32 copies of the weights, its loss scale
    and counters, and the scheduler. With ZeRO each rank saves its own pieces, so the number of
    ranks has to stay.

    Args:
        engine: what `deepspeed.initialize` returns first.

    Returns:
        Name -> part. More can be added: `{**engine_state(engine), "ema": ema}`.

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
    """The basic optimizer of an engine, as an item of a state. It is never stepped itself.

    Attributes:
        per_rank: whether the moments differ between ranks.
        trainer_limit: the norm that DeepSpeed clips at (`gradient_clipping`), or None.
    """

    def __init__(self, engine: Any) -> None:
        # Not super().__init__(): the wrapped optimizer has the hooks.
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
                f"a DeepSpeed engine takes no attach={{{unknown[0]!r}: ...}}: where it decides and "
                "how it skips follows from DeepSpeed's config; leave it out"
            )
        return heal_basic_optimizer(self._engine, lambda: core, group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the basic optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads it into the existing tensors, to which DeepSpeed keeps references."""
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
    """The rest of an engine: float32 weights, loss scale, counters.

    Attributes:
        per_rank: whether each rank has its own pieces of the weights.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.per_rank = is_sharded(engine) and engine.dp_world_size > 1

    @property
    def mid_accumulation(self) -> bool:
        """Whether there are gradients that no step has used."""
        engine = self._engine
        if not engine.managed_gradient_accumulation():
            return engine._unmanaged_backward_count > 0
        return engine.micro_steps % engine.gradient_accumulation_steps() != 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors are not copied."""
        scale = self._scale()
        return {
            "masters": self._masters(),
            "scale": {name: getattr(scale, name) for name in SCALE if hasattr(scale, name)},
            "counters": {name: getattr(self._engine, name) for name in COUNTERS},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads it in place, and drops accumulated gradients."""
        for live, saved in zip(self._masters(), state["masters"], strict=True):
            live.copy_(saved)
        scale = self._scale()
        for name, value in state["scale"].items():
            setattr(scale, name, value)
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)
        self._drop_gradients()

    def _masters(self) -> list[Tensor]:
        """The weights that the optimizer steps, except the module's own."""
        own = {id(p) for p in self._engine.module.parameters()}
        params = gradients.parameters(self._engine.basic_optimizer)
        return [p.detach() for p in params if id(p) not in own]

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
            held = getattr(optimizer, name, {})
            for key in held:
                held[key] = None
        if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
            optimizer.clear_hp_grads()
