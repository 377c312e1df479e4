"""Heals the engine that `deepspeed.initialize` returns, with ZeRO stage 0, 1 or 2.

engine             the entry points: `heal_engine`, and `engine_state` for a Healer
optimizer          `DeepSpeedOptimizer`: what a DeepSpeed engine steps, as a part of the state
step               one step: its signals, and the decision in each parameter group
checks             what cannot be healed
trainer_internals  every private name of DeepSpeed that healcore uses

The basic optimizer is the torch optimizer that `engine.step()` steps. With ZeRO-1 and ZeRO-2 it
holds only this rank's flat piece of each parameter group, and DeepSpeed steps it once per group.
Its gradients in one call are therefore only a part of the step's gradients.
"""

from __future__ import annotations

from healcore.torch.trainers.deepspeed.engine import engine_state, heal_engine

__all__ = ["engine_state", "heal_engine"]
