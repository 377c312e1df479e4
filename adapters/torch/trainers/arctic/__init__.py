"""Heals the trainers of ArcticTraining, which train a DeepSpeed engine.

callbacks  the entry point `arctic_callbacks`
epochs     passes the Healer's batches to the trainer, epoch by epoch

ArcticTraining has callbacks, and all names that healcore uses are public. So this folder has no
`trainer_internals`.
"""

from __future__ import annotations

from healcore.torch.trainers.arctic.callbacks import arctic_callbacks

__all__ = ["arctic_callbacks"]
