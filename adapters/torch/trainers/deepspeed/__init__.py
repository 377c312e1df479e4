"""Heals the engine that `deepspeed.initialize` returns, with ZeRO stage 0, 1 or 2."""
