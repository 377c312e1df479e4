"""Verified checkpoints: the protocol and the parts that all stores share.

The stores come from the adapters: `healcore.torch.store`, `healcore.jax.store`.
"""

from __future__ import annotations

from healcore.runtime.store.claim import StoreInUse
from healcore.runtime.store.course import Course
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    NoGoodCheckpoint,
    SaveFailed,
    StateMismatch,
    StoreError,
    UnsavableState,
)
from healcore.runtime.store.protocol import CheckpointStore, Restored, Saved, Status
from healcore.runtime.store.retention import (
    Keep,
    RestoreResult,
    restore_first_intact,
    superfluous,
)

__all__ = [
    "CheckpointDamaged",
    "CheckpointNotFound",
    "CheckpointStore",
    "Course",
    "Keep",
    "NoGoodCheckpoint",
    "RestoreResult",
    "Restored",
    "SaveFailed",
    "Saved",
    "StateMismatch",
    "Status",
    "StoreError",
    "StoreInUse",
    "UnsavableState",
    "restore_first_intact",
    "superfluous",
]
