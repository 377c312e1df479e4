"""The exceptions of a run, for programs that handle them separately.

Each derives from `healcore.HealcoreError`. Most also derive from `PolicyError` (invalid policy),
`StoreError` (checkpoints), `DataError` (loaders) or `RunStopped` (the run). `healcore.jax` has one
more exception, `HealStateError`.
"""

from __future__ import annotations

from healcore.adapter_registry import MissingExtraError
from healcore.core.engine import StateError
from healcore.core.errors import (
    AttachError,
    CommitError,
    HealcoreError,
    ParametersChangedError,
    RanksDisagreeError,
)
from healcore.core.signals import SignalError
from healcore.policy import PolicyError
from healcore.runtime.data import DataError, EmptyLoader, UnusableLoader
from healcore.runtime.driver import HealerError, UnknownState
from healcore.runtime.faults.microbatches import MicrobatchError
from healcore.runtime.run.ending.exits import (
    AlreadyCompleted,
    EndRequested,
    IncompleteRun,
    Interrupted,
    LastStateNotSaved,
    RunStopped,
    Terminated,
)
from healcore.runtime.run.start import StoreNotEmpty
from healcore.runtime.store.checkpoints import (
    CheckpointDamaged,
    CheckpointNotFound,
    NoGoodCheckpoint,
    SaveFailed,
    StateMismatch,
    StoreError,
    UnsavableState,
)
from healcore.runtime.store.claim import StoreInUse
from healcore.runtime.store.ranks import RankFailed

__all__ = [
    "AlreadyCompleted",
    "AttachError",
    "CheckpointDamaged",
    "CheckpointNotFound",
    "CommitError",
    "DataError",
    "EmptyLoader",
    "EndRequested",
    "HealcoreError",
    "HealerError",
    "IncompleteRun",
    "Interrupted",
    "LastStateNotSaved",
    "MicrobatchError",
    "MissingExtraError",
    "NoGoodCheckpoint",
    "ParametersChangedError",
    "PolicyError",
    "RankFailed",
    "RanksDisagreeError",
    "RunStopped",
    "SaveFailed",
    "SignalError",
    "StateError",
    "StateMismatch",
    "StoreError",
    "StoreInUse",
    "StoreNotEmpty",
    "Terminated",
    "UnknownState",
    "UnsavableState",
    "UnusableLoader",
]
