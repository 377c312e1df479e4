"""Heals the engine that `deepspeed.initialize` returns, with ZeRO stage 0, 1 or 2."""

from __future__ import annotations

from healcore.torch.trainers.deepspeed.attachment import heal_engine
from healcore.torch.trainers.deepspeed.state import engine_state

__all__ = ["engine_state", "heal_engine"]
