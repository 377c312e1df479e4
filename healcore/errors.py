"""Every exception of healcore, for programs that tell them apart.

Each derives from `healcore.HealcoreError`, and most from one of the four others that a program
catches: `PolicyError` (a policy is not valid), `StoreError` (checkpoints), `DataError` (loaders)
and `RunStopped` (the policy has ended the run).
"""

from __future__ import annotations

from healcore.core.engine import StateError as StateError
from healcore.core.errors import HealcoreError as HealcoreError
from healcore.core.signals import SignalError as SignalError
from healcore.extras import MissingExtraError as MissingExtraError
from healcore.policy import PolicyError as PolicyError
from healcore.runtime.data import DataError as DataError
from healcore.runtime.data import EmptyLoader as EmptyLoader
from healcore.runtime.data import UnusableLoader as UnusableLoader
from healcore.runtime.driver import UnknownState as UnknownState
from healcore.runtime.healer import HealerError as HealerError
from healcore.runtime.loop.setup import StoreNotEmpty as StoreNotEmpty
from healcore.runtime.loop.termination import AlreadyCompleted as AlreadyCompleted
from healcore.runtime.loop.termination import EndRequested as EndRequested
from healcore.runtime.loop.termination import IncompleteRun as IncompleteRun
from healcore.runtime.loop.termination import Interrupted as Interrupted
from healcore.runtime.loop.termination import LastStateNotSaved as LastStateNotSaved
from healcore.runtime.loop.termination import RunStopped as RunStopped
from healcore.runtime.loop.termination import Terminated as Terminated
from healcore.runtime.microbatches.splitting import UnsplittableBatch as UnsplittableBatch
from healcore.runtime.microbatches.window import MicrobatchError as MicrobatchError
from healcore.runtime.recovery.journal import JournalError as JournalError
from healcore.runtime.store import CheckpointDamaged as CheckpointDamaged
from healcore.runtime.store import LastGoodKept as LastGoodKept
from healcore.runtime.store import NoGoodCheckpoint as NoGoodCheckpoint
from healcore.runtime.store import NotFinite as NotFinite
from healcore.runtime.store import NotThere as NotThere
from healcore.runtime.store import SaveFailed as SaveFailed
from healcore.runtime.store import StateMismatch as StateMismatch
from healcore.runtime.store import StoreError as StoreError
from healcore.runtime.store import StoreInUse as StoreInUse
from healcore.runtime.store import UnsavableState as UnsavableState
from healcore.runtime.store.errors import Untrusted as Untrusted
from healcore.runtime.store.ranks import RankFailed as RankFailed
