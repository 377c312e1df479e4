"""`Run`: the parts of one run, each by one name; `construct` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from healcore.runtime.run.journal import Journal
from healcore.runtime.run.ledger import Ledger
from healcore.runtime.run.loop import Loop
from healcore.runtime.run.out_of_memory import OutOfMemory
from healcore.runtime.run.program_watch import StructureChanges
from healcore.runtime.run.progress import RunProgress
from healcore.runtime.run.restore.way_back import WayBack
from healcore.runtime.run.rollback.holding import Holding
from healcore.runtime.run.rollback.nonfinite import NonfiniteRecovery
from healcore.runtime.run.rollback.recovery import Recovery
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.witness.witness import Witness
from healcore.runtime.run_options import HostPolicy, Options
from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.store.store import CheckpointStore


@dataclass(eq=False)
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

    `construct` makes the parts in the order of the fields. No part replaces another one. A part
    takes the `Run`, and uses the other parts by their names, as in `self.run.recovery`. While it is
    made, it may read the fields above its own.

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

    progress: RunProgress = field(default_factory=RunProgress, init=False)
    """Steps done, in the run and in this process."""
    loaders: Sources = field(init=False)
    """The loaders of the program, with their positions."""
    data_state: DataState = field(init=False)
    """Random states and loader positions, as an item of a checkpoint."""
    step_batches: StepBatches = field(init=False)
    """The batches that were read since the last step."""
    schedule: SaveSchedule = field(init=False)
    """When a regular save is due."""
    dispatch_queue: DispatchQueue = field(default_factory=DispatchQueue, init=False)
    """Dispatches that the host has not read yet."""
    metrics: RunMetrics = field(init=False)
    """The metrics of the newest step, counts since the run began, and the learning rates."""
    monitor: IncidentMonitor = field(init=False)
    """Fills the ledger with incidents, writes events, and calls the hooks of the program."""
    holding: Holding = field(init=False)
    """Learns in which ranges the run is healthy, and holds what has left its range."""
    witness: Witness = field(init=False)
    """Compares the weights with earlier weights."""
    saver: Saver = field(init=False)
    """Saves and deletes checkpoints, and knows which are finite, damaged or known-good."""
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
    end: RunEnd | None = field(default=None, init=False)
    """How the run has ended, or None until then."""

    @property
    def ledger(self) -> Ledger:
        """The incidents and rollbacks of the run, also those of undone steps."""
        return self.record.ledger

    @property
    def journal(self) -> Journal:
        """What the steps up to now have shown. A way back takes the journal of the checkpoint."""
        return self.record.journal


def construct(
    options: Options,
    driver: Driver,
    ranks: Ranks,
    store: CheckpointStore,
    claims: Sequence[Claim],
) -> Run:
    """Makes a run with all of its parts, in the order of the fields of `Run`.

    No part does anything while it is made. `open_run` then resumes from a checkpoint.

    Args:
        options: the arguments of `Healer`.
        driver: the framework, attached to the optimizers.
        ranks: the processes of the run.
        store: the checkpoints.
        claims: the locks of the store's directories.

    Returns:
        The run. Nothing is restored and nothing is logged yet.

    Raises:
        StoreError: a file of events or metrics cannot be opened.
    """
    policy, record = options.policy, RunRecord()
    store.nonfinite_ok += tuple(options.checkpoints.nonfinite_ok)
    run = Run(
        policy=policy,
        driver=driver,
        store=store,
        ranks=ranks,
        log=_open_log(options, store, ranks),
        record=record,
        end_requests=EndRequests(ranks, driver, options.stop_file),
        claims=claims,
    )
    loss_fn = options.loss_fn if policy.rolls_back else None
    retries = None
    if "retry" in policy.answers(Cause.NETWORK):
        retries = Retries("reading a batch", policy, run)
    run.loaders = Sources(retries)
    run.data_state = DataState(run.loaders)
    run.step_batches = StepBatches(run, keeps_contents=loss_fn is not None)
    run.schedule = SaveSchedule(run, options.checkpoints.every)
    run.metrics = RunMetrics(run)
    run.monitor = IncidentMonitor(run, options.hooks)
    run.holding = Holding(run)
    run.witness = Witness(run, loss_fn, options.loss_fn_cost)
    run.saver = Saver(run, options.checkpoints.keep)
    run.way_back = WayBack(run)
    run.nonfinite_recovery = NonfiniteRecovery(run)
    run.stopping = Stopping(run)
    of_trainer = run_settings.trainer_settings(options.state)
    run.recovery = Recovery(run, ends_by_steps=run_settings.trainer_ends_by_steps(of_trainer))
    run.hang_guard = HangGuard(policy, ranks, run.log)
    run.out_of_memory = OutOfMemory(run)
    run.loop = Loop(run, StructureChanges(run), has_trainer=bool(of_trainer))
    return run


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
        path = None if store.root is None else store.root / "healcore.events.jsonl"
        events = Log(_unlinked(path, "events"), follow_links=False)
    metrics = None
    if given.metrics != "auto":
        metrics = None if given.metrics is None else Path(given.metrics)
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
