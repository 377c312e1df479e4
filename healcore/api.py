"""Public names of `healcore` except its submodules; imported on first use."""

from __future__ import annotations

from healcore.core.decision import Action as Action
from healcore.core.decision import Cause as Cause
from healcore.core.decision import Decision as Decision
from healcore.policy import PolicyError as PolicyError
from healcore.runtime.data import Cursor as Cursor
from healcore.runtime.data import DataError as DataError
from healcore.runtime.faults.classification import Fault as Fault
from healcore.runtime.faults.classification import classify as classify
from healcore.runtime.faults.retry import retrying as retrying
from healcore.runtime.healer import Healer as Healer
from healcore.runtime.reporting.trackers import Tracker as Tracker
from healcore.runtime.run.ending.exits import RunStopped as RunStopped
from healcore.runtime.run_options import Checkpoints as Checkpoints
from healcore.runtime.run_options import Hooks as Hooks
from healcore.runtime.run_options import IncidentContext as IncidentContext
from healcore.runtime.run_options import Logging as Logging
from healcore.runtime.script import start as start
from healcore.runtime.store.checkpoints import Keep as Keep
from healcore.runtime.store.checkpoints import StoreError as StoreError
from healcore.runtime.store.store import CheckpointStore as CheckpointStore
