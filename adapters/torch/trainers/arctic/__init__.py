"""Heals the trainers of ArcticTraining, which train a DeepSpeed engine.

callbacks  the entry point `arctic_callbacks`, and the epochs with the Healer's batches

ArcticTraining has callbacks, and all names that healcore uses are public. So this folder has
no table of private names.
"""

from __future__ import annotations

from healcore.torch.trainers.arctic.callbacks import arctic_callbacks

__all__ = ["arctic_callbacks"]
