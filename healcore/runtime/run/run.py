"""`Run`: the parts of one run, each by one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from healcore.runtime.data.sources import Sources
from healcore.runtime.driver import Driver
from healcore.runtime.hang_guard import HangGuard
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.batch_parts import BatchParts
from healcore.runtime.run.batches.batch_reader import BatchReader
from healcore.runtime.run.batches.step_batches import StepBatches
from healcore.runtime.run.checkpoints.known import KnownCheckpoints
from healcore.runtime.run.checkpoints.saver import Saver
from healcore.runtime.run.checkpoints.schedule import SaveSchedule
from healcore.runtime.run.data_state import DataState
from healcore.runtime.run.dispatch_queue import DispatchQueue
from healcore.runtime.run.ending.requests import EndRequests
from healcore.runtime.run.ending.stopping import Stopping
from healcore.runtime.run.incidents.monitor import IncidentMonitor
from healcore.runtime.run.incidents.rate_log import RateLog
from healcore.runtime.run.journal import Journal
from healcore.runtime.run.ledger import Ledger
from healcore.runtime.run.loop import Loop
from healcore.runtime.run.out_of_memory import OutOfMemory
from healcore.runtime.run.progress import RunProgress
from healcore.runtime.run.restore.stored import StoredCheckpoints
from healcore.runtime.run.restore.way_back import WayBack
from healcore.runtime.run.rollback.holding import Holding
from healcore.runtime.run.rollback.nonfinite import NonfiniteRecovery
from healcore.runtime.run.rollback.recovery import Recovery
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.witness.witness import Witness
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.store.store import CheckpointStore


@dataclass(eq=False)
class Run:
    """The parts of one run, each by one name.

        Healer --- Run -+- policy, driver, store, ranks, log, record    what is given
                        +- loop, progress, dispatch_queue,              steps
                        |  hang_guard, end_requests
                        +- loaders, data_state, step_batches,           batches and
                        |  batch_reader                                 random states
                        +- rate_log, monitor, holding, witness          what is seen
                        +- recovery, nonfinite_recovery,                what is decided
                        |  out_of_memory, stopping
                        +- schedule, known_checkpoints, saver,          checkpoints
                        |  stored_checkpoints
                        +- way_back                                     restores

    `construct` makes the parts in the order of the fields. No part replaces another one. A part
    gets the other parts in one of two ways:

    - Each by name, as keyword arguments. This is the usual way, as in `SaveSchedule`: its signature
      shows what the part depends on.
    - All in the `Run`, if the part uses a part that is made after it, or more than eight others, as
      `Loop`, `Saver` and `Recovery` do. The part may read the fields above its own while it is
      made, and all fields afterwards: `self.run.recovery`.

    `record` has what a checkpoint saves. Three states in it are used by a name of their own, and by
    no other: `journal`, `ledger` and `holding.envelope`.
    """

    policy: HostPolicy
    """The policy with the rules that the host applies."""
    driver: Driver
    """The framework: the state of the program, its optimizers and their engines."""
    store: CheckpointStore
    """The checkpoints."""
    ranks: Ranks
    """The processes of the run."""
    log: RunLog
    """Events, metrics and console lines."""
    record: RunRecord
    """The facts of the run that a checkpoint holds, without the facts at a step."""
    end_requests: EndRequests
    """Signals, the stop file and the votes to end."""
    claims: Sequence[Claim]
    """The locks of the store's directories."""
    batch_parts: BatchParts
    """How batches are split since memory ran out."""

    progress: RunProgress = field(default_factory=RunProgress, init=False)
    """Steps done, in the run and in this process."""
    loaders: Sources = field(init=False)
    """The loaders of the program, with their positions."""
    data_state: DataState = field(init=False)
    """Random states and loader positions, as an item of a checkpoint."""
    step_batches: StepBatches = field(init=False)
    """The batches that were read since the last step."""
    batch_reader: BatchReader = field(init=False)
    """Reads the batches of the program's loaders."""
    schedule: SaveSchedule = field(init=False)
    """When a regular save is due."""
    dispatch_queue: DispatchQueue = field(default_factory=DispatchQueue, init=False)
    """Dispatches that the host has not read yet."""
    rate_log: RateLog = field(init=False)
    """The multipliers of the learning rates, and the event of each change."""
    monitor: IncidentMonitor = field(init=False)
    """Fills the ledger with incidents, writes events, and calls the hooks of the program."""
    holding: Holding = field(init=False)
    """Learns in which ranges the run is healthy, and holds what has left its range."""
    witness: Witness = field(init=False)
    """Compares the weights with earlier weights."""
    known_checkpoints: KnownCheckpoints = field(init=False)
    """Which checkpoints are finite, damaged or known-good."""
    saver: Saver = field(init=False)
    """Saves checkpoints, and deletes checkpoints that are not needed any more."""
    stored_checkpoints: StoredCheckpoints = field(init=False)
    """Reads the checkpoints that all ranks can load."""
    way_back: WayBack = field(init=False)
    """Continues the run from a checkpoint, at a start and at a rollback."""
    nonfinite_recovery: NonfiniteRecovery = field(init=False)
    """Notices NaN and Inf in weights, in a save, and in every step."""
    stopping: Stopping = field(init=False)
    """Stops the run with a diagnosis."""
    recovery: Recovery = field(init=False)
    """Answers each trouble: goes back, accepts or stops."""
    hang_guard: HangGuard = field(init=False)
    """Reports a step that never returns."""
    out_of_memory: OutOfMemory = field(init=False)
    """Splits batches that do not fit into memory."""
    loop: Loop = field(init=False)
    """The work between two steps."""

    @property
    def ledger(self) -> Ledger:
        """The incidents and rollbacks of the run, also those of undone steps."""
        return self.record.ledger

    @property
    def journal(self) -> Journal:
        """What the steps up to now have shown. A way back takes the journal of the checkpoint."""
        return self.record.journal
