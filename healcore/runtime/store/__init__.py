"""Verified checkpoints: the store and the parts that all frameworks share.

The stores come from the adapters: `healcore.torch.store`, `healcore.jax.store`.
"""

from __future__ import annotations

from healcore.runtime.store.claim import StoreInUse
from healcore.runtime.store.saved import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointNotFound,
    Keep,
    NoGoodCheckpoint,
    Restored,
    Saved,
    SaveFailed,
    StateMismatch,
    Status,
    StoreError,
    UnsavableState,
    superfluous,
)
from healcore.runtime.store.store import CheckpointStore

__all__ = [
    "AttemptHistory",
    "CheckpointDamaged",
    "CheckpointNotFound",
    "CheckpointStore",
    "Keep",
    "NoGoodCheckpoint",
    "Restored",
    "SaveFailed",
    "Saved",
    "StateMismatch",
    "Status",
    "StoreError",
    "StoreInUse",
    "UnsavableState",
    "superfluous",
]
