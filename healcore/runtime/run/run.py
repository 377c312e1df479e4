"""`Run`: the parts of one run, each by one name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from healcore.core.decision import Cause
from healcore.events import Log
from healcore.events.log import metrics_path
from healcore.events.metrics import MetricsLog
from healcore.runtime.data.sources import Sources
from healcore.runtime.driver import Driver
from healcore.runtime.faults.retry import Retries
from healcore.runtime.hang_guard import HangGuard
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.reporting.trackers import Trackers
from healcore.runtime.run import run_settings
from healcore.runtime.run.batches.step_batches import StepBatches
from healcore.runtime.run.checkpoints.saver import Saver
from healcore.runtime.run.checkpoints.schedule import SaveSchedule
from healcore.runtime.run.data_state import DataState
from healcore.runtime.run.dispatch_queue import DispatchQueue
from healcore.runtime.run.ending.exits import RunEnd
from healcore.runtime.run.ending.requests import EndRequests
from healcore.runtime.run.ending.stopping import Stopping
from healcore.runtime.run.incidents.metrics import RunMetrics
from healcore.runtime.run.incidents.monitor import IncidentMonitor
from healcore.runtime.run.journal import Journal, Ledger
from healcore.runtime.run.loop import Loop
from healcore.runtime.run.out_of_memory import OutOfMemory
from healcore.runtime.run.progress import RunProgress
from healcore.runtime.run.restore.way_back import WayBack
from healcore.runtime.run.rollback.holding import Holding
from healcore.runtime.run.rollback.nonfinite import NonfiniteRecovery
from healcore.runtime.run.rollback.recovery import Recovery
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.witness.witness import Witness
from healcore.runtime.run_options import Options
from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.store.store import CheckpointStore


class Run:
    """The parts of one run, each by one name.

        Healer --- Run -+- policy, driver, store, ranks, log, record    what is given
                        +- loop, progress, dispatch_queue,              steps
                        |  hang_guard, end_requests
                        +- loaders, data_state, step_batches            batches, random states
                        +- metrics, monitor, holding, witness           what is seen
                        +- recovery, nonfinite_recovery,                what is decided
                        |  out_of_memory, stopping
                        +- schedule, saver,                             checkpoints
                        +- way_back                                     restores

    No part replaces another one. A part takes the `Run`, and uses the other parts by their names,
    as in `self.run.recovery`. While it is made, it may read the parts above its own.

    No part does anything while it is made. `open_run` then resumes from a checkpoint.

    `record` has what a checkpoint saves. Three states in it are used by a name of their own, and by
    no other: `journal`, `ledger` and `holding.envelope`.

    Args:
        options: the arguments of `Healer`.
        driver: the framework, attached to the optimizers.
        ranks: the processes of the run.
        store: the checkpoints.
        claims: the locks of the store's directories.

    Raises:
        StoreError: a file of events or metrics cannot be opened.
    """

    opened: ClassVar = 0
    """Number of runs that this process has opened, with and without a directory."""
    completed: ClassVar[set[Path]] = set()
    """The directories of the runs that this process has completed. A program that trains several
    runs may pass the same one twice by mistake: the second run then raises an error, instead of a
    load of the final state of the first run."""

    def __init__(
        self,
        options: Options,
        driver: Driver,
        ranks: Ranks,
        store: CheckpointStore,
        claims: Sequence[Claim],
    ) -> None:
        policy, of_trainer = options.policy, run_settings.trainer_settings(options.state)
        self.pid = os.getpid()
        """The process of the run. A forked child must not end its parent's run."""
        self.policy = policy
        """The policy with the rules that the host applies."""
        self.driver = driver
        """The framework: the state of the program, its optimizers and their engines."""
        self.ranks = ranks
        """The processes of the run."""
        self.claims = claims
        """The locks of the store's directories."""
        self.store = store
        """The checkpoints."""
        self.store.nonfinite_ok += tuple(options.checkpoints.nonfinite_ok)
        self.log = _open_log(options, self.store, ranks)
        """Events, metrics and console lines."""
        self.record = RunRecord()
        """The facts of the run that a checkpoint holds, without the facts at a step."""
        self.end_requests = EndRequests(ranks, driver, options.stop_file)
        """Signals, the stop file and the votes to end."""
        retries = None
        if "retry" in policy.answers(Cause.NETWORK):
            retries = Retries("reading a batch", policy, self)
        self.loaders = Sources(retries)
        """The loaders of the program, with their positions."""
        self.progress = RunProgress(self.loaders, has_trainer=bool(of_trainer))
        """Steps done, in the run and in this process, and the phase of the loop."""
        self.dispatch_queue = DispatchQueue(self.progress)
        """Dispatches that the host has not read yet."""
        self.data_state = DataState(self.loaders)
        """Random states and loader positions, as an item of a checkpoint."""
        self.loss_fn = options.loss_fn
        """The program's `loss_fn`, or None."""
        if policy.rolls_back:
            loss_fn = options.loss_fn
        else:
            loss_fn = None
        self.step_batches = StepBatches(self, keeps_contents=loss_fn is not None)
        """The batches that were read since the last step."""
        self.schedule = SaveSchedule(self, options.checkpoints.every)
        """When a regular save is due."""
        self.metrics = RunMetrics(self)
        """The metrics of the newest step, counts since the run began, and the learning rates."""
        self.monitor = IncidentMonitor(self, options.hooks)
        """Fills the ledger with incidents, writes events, and calls the hooks of the program."""
        self.holding = Holding(self)
        """Learns in which ranges the run is healthy, and holds what has left its range."""
        self.witness = Witness(self, loss_fn, options.loss_fn_cost)
        """Compares the weights with earlier weights."""
        self.saver = Saver(self, options.checkpoints.keep)
        """Saves and deletes checkpoints, and knows which are finite, damaged or known-good."""
        self.way_back = WayBack(self)
        """Continues the run from a checkpoint, at a start and at a rollback."""
        self.nonfinite_recovery = NonfiniteRecovery(self)
        """Notices NaN and Inf in weights, in a save, and in every step."""
        self.stopping = Stopping(self)
        """Stops the run with a diagnosis."""
        self.recovery = Recovery(self, ends_by_steps=run_settings.trainer_ends_by_steps(of_trainer))
        """Answers each trouble: goes back, accepts or stops."""
        self.hang_guard = HangGuard(policy, ranks, self.log)
        """Reports a step that never returns."""
        self.out_of_memory = OutOfMemory(self)
        """Splits batches that do not fit into memory."""
        self.loop = Loop(self)
        """The work between two steps."""
        self.end: RunEnd | None = None
        """How the run has ended, or None until then."""

    @property
    def ledger(self) -> Ledger:
        """The incidents and rollbacks of the run, also those of undone steps."""
        return self.record.ledger

    @property
    def journal(self) -> Journal:
        """What the steps up to now have shown. A way back takes the journal of the checkpoint."""
        return self.record.journal


def _open_log(options: Options, store: CheckpointStore, ranks: Ranks) -> RunLog:
    """The log of a rank. Only rank 0 writes files: every rank has the same numbers.

    Files that the user has not named are next to the checkpoints: a link there is not followed.
    """
    given, hooks = options.logging, options.hooks
    if ranks.rank:
        return RunLog(Log(None), console=given.console, silent=True, hooks=hooks)
    if given.events is not None:
        events = Log(Path(given.events).absolute())
    else:
        if store.root is None:
            path = None
        else:
            path = store.root / "healcore.events.jsonl"
        events = Log(_unlinked(path, "events"), follow_links=False)
    metrics = None
    if given.metrics != "auto":
        if given.metrics is None:
            metrics = None
        else:
            metrics = Path(given.metrics)
    elif events.path and (events.path.is_file() or not events.path.exists()):
        metrics = _unlinked(metrics_path(events.path), "metrics")  # no pipe and no terminal
    return RunLog(
        events,
        metrics=MetricsLog(
            metrics,
            process_id=events.process_id,
            automatic=given.metrics == "auto",
            tracked=bool(options.trackers),
        ),
        console=given.console,
        trackers=Trackers(options.trackers),
        hooks=hooks,
    )


def _unlinked(path: Path | None, option: str) -> Path | None:
    """A path that the user has not chosen. Raises StoreError if it is a link."""
    if path is not None and path.is_symlink():
        raise StoreError(
            f"{path} is a link, and healcore follows no link at a path that it has chosen itself: "
            f"remove it, or name the file that it leads to with {option}="
        )
    return path
