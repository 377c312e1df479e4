"""Makes the parts of a run, in the order of the fields of `Run`.

    construct
        what is given          policy, driver, store, ranks, log, record
        _add_data_parts        loaders, batches and random states
        _add_observing_parts   what is seen: saves that are due, incidents, comparisons
        _add_checkpoint_parts  what is saved and restored
        _add_deciding_parts    what is decided, and the loop

No part does anything while it is made. `start` then resumes from a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from healcore.core.decision import Cause
from healcore.events import Log
from healcore.events.log import metrics_path
from healcore.events.metrics import MetricsLog
from healcore.runtime.data.sources import Sources
from healcore.runtime.driver import Driver, LossFn
from healcore.runtime.hang_guard import HangGuard
from healcore.runtime.healer_options import Options
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.reporting.trackers import Trackers
from healcore.runtime.run import run_settings
from healcore.runtime.run.batch_parts import BatchParts
from healcore.runtime.run.batches.batch_reader import BatchReader
from healcore.runtime.run.batches.step_batches import StepBatches
from healcore.runtime.run.call_retries import retries_of
from healcore.runtime.run.checkpoints.known import KnownCheckpoints
from healcore.runtime.run.checkpoints.saver import Saver
from healcore.runtime.run.checkpoints.schedule import SaveSchedule
from healcore.runtime.run.data_state import DataState
from healcore.runtime.run.ending.requests import EndRequests
from healcore.runtime.run.ending.stopping import Stopping
from healcore.runtime.run.incidents.monitor import IncidentMonitor
from healcore.runtime.run.incidents.rate_log import RateLog
from healcore.runtime.run.loop import Loop
from healcore.runtime.run.out_of_memory import OutOfMemory
from healcore.runtime.run.program_watch import StructureChanges
from healcore.runtime.run.restore.stored import StoredCheckpoints
from healcore.runtime.run.restore.way_back import WayBack
from healcore.runtime.run.rollback.holding import Holding
from healcore.runtime.run.rollback.nonfinite import NonfiniteRecovery
from healcore.runtime.run.rollback.recovery import Recovery
from healcore.runtime.run.run import Run
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.witness.witness import FORWARD_PASS, Witness
from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.places import StorePlace, joined
from healcore.runtime.store.ranks import Ranks, run_on_first
from healcore.runtime.store.store import CheckpointStore


def _open_store(
    given: StorePlace | tuple[StorePlace, ...] | None, driver: Driver, ranks: Ranks
) -> CheckpointStore:
    """The store of the run. Several stores are written as one, in the order given."""
    if isinstance(given, tuple):
        store = joined([_open_store(each, driver, ranks) for each in given])
        run_on_first(ranks, store.check_run)
        return store
    if isinstance(given, CheckpointStore):
        return given
    return driver.store(given)


def construct(options: Options, driver: Driver, ranks: Ranks, claims: Sequence[Claim]) -> Run:
    """Makes a run with all of its parts.

    Args:
        options: the arguments of `Healer`.
        driver: the framework, attached to the optimizers.
        ranks: the processes of the run.
        claims: the locks of the store's directories.

    Returns:
        The run. Nothing is restored and nothing is logged yet.

    Raises:
        StoreError: the store, or a file of events or metrics, cannot be opened.
    """
    policy = options.policy
    store = _open_store(options.store, driver, ranks)
    store.nonfinite_ok += tuple(options.checkpoints.nonfinite_ok)
    record = RunRecord()
    run = Run(
        policy=policy,
        driver=driver,
        store=store,
        ranks=ranks,
        log=_log(options, store, ranks),
        record=record,
        end_requests=EndRequests(ranks, driver, options.stop_file),
        claims=claims,
        batch_parts=BatchParts(record),
    )
    loss_fn = options.loss_fn if policy.rolls_back else None
    _add_data_parts(run, keeps_contents=loss_fn is not None)
    _add_observing_parts(run, options, loss_fn)
    _add_checkpoint_parts(run, options)
    _add_deciding_parts(run, options)
    return run


def _log(options: Options, store: CheckpointStore, ranks: Ranks) -> RunLog:
    """The log of a rank. Only rank 0 writes: every rank has the same numbers."""
    events, selected = Log(None), options.trackers
    if ranks.rank:
        selected = ()
    else:
        events = _events(options.logging.events, store.root)
    return RunLog(
        events,
        metrics=_metrics(options.logging.metrics, events, ranks, tracked=bool(selected)),
        console=options.logging.console,
        silent=ranks.rank > 0,
        trackers=Trackers(selected),
        hooks=options.hooks,
    )


def _add_data_parts(run: Run, *, keeps_contents: bool) -> None:
    """Adds the loaders, and what is known of batches and random states.

    Args:
        run: the run, with what is given.
        keeps_contents: whether the contents of batches are kept for comparisons.
    """
    retries = None
    if "retry" in run.policy.answers(Cause.NETWORK):
        retries = retries_of(run, "reading a batch")
    run.loaders = Sources(retries)
    run.data_state = DataState(run.loaders)
    run.step_batches = StepBatches(
        loaders=run.loaders,
        progress=run.progress,
        keeps_contents=keeps_contents,
    )
    run.batch_reader = BatchReader(
        policy=run.policy,
        ranks=run.ranks,
        log=run.log,
        end_requests=run.end_requests,
    )


def _add_observing_parts(run: Run, options: Options, loss_fn: LossFn | None) -> None:
    """Adds what watches the steps: the schedule of saves, incidents, comparisons, ranges.

    Args:
        run: the run, with its data parts.
        options: the arguments of `Healer`.
        loss_fn: the program's `loss_fn`, or None if the policy rolls nothing back.
    """
    run.schedule = SaveSchedule(run, options.checkpoints.every)
    run.rate_log = RateLog(run)
    run.monitor = IncidentMonitor(run, options.hooks)
    add_comparing_parts(run, loss_fn, loss_fn_cost=options.loss_fn_cost)


def add_comparing_parts(
    run: Run, loss_fn: LossFn | None, *, loss_fn_cost: float = FORWARD_PASS
) -> None:
    """Adds what compares weights, and what holds rates, numbers and norms in healthy ranges.

    Args:
        run: the run, with a schedule of saves and a rate log.
        loss_fn: the program's `loss_fn`, or None to compare nothing.
        loss_fn_cost: cost of one call of `loss_fn` on a batch, in training steps.
    """
    run.holding = Holding(run)
    run.witness = Witness(run, loss_fn, loss_fn_cost)


def _add_checkpoint_parts(run: Run, options: Options) -> None:
    """Adds what saves checkpoints, knows them and restores them."""
    run.known_checkpoints = KnownCheckpoints(run)
    run.saver = Saver(run, options.checkpoints.keep)
    run.stored_checkpoints = StoredCheckpoints(run)
    run.way_back = WayBack(run)


def _add_deciding_parts(run: Run, options: Options) -> None:
    """Adds what decides about rollbacks, the end and memory, and the loop that asks for it."""
    run.nonfinite_recovery = NonfiniteRecovery(run)
    of_trainer = run_settings.trainer_settings(options.state)
    run.stopping = Stopping(run)
    run.recovery = Recovery(run, ends_by_steps=run_settings.trainer_ends_by_steps(of_trainer))
    run.hang_guard = HangGuard(run.policy, run.ranks, run.log)
    run.out_of_memory = OutOfMemory(run)
    structure = StructureChanges(
        driver=run.driver,
        log=run.log,
        record=run.record,
        progress=run.progress,
        loaders=run.loaders,
        schedule=run.schedule,
        witness=run.witness,
    )
    run.loop = Loop(run, structure, has_trainer=bool(of_trainer))


def _events(given: str | os.PathLike[str] | None, folder: Path | None) -> Log:
    """The log of events: the file that the user names, else a file in the store's directory."""
    if given is not None:
        return Log(Path(given).absolute())
    path = None
    if folder is not None:
        path = folder / "healcore.events.jsonl"
    return Log(_unlinked(path, "events"), follow_links=False)


def _metrics(
    given: str | os.PathLike[str] | None, log: Log, ranks: Ranks, *, tracked: bool
) -> MetricsLog:
    """The table of metrics: the file that the user names, or next to the events with "auto".

    Only rank 0 writes it: every rank has the same numbers.
    """
    path = None
    if ranks.rank or given != "auto":
        if given is not None and not ranks.rank:
            path = Path(given)
        return MetricsLog(path, process_id=log.process_id, tracked=tracked)
    if log.path and (log.path.is_file() or not log.path.exists()):  # not a pipe or a terminal
        path = metrics_path(log.path)
    path = _unlinked(path, "metrics")
    return MetricsLog(path, process_id=log.process_id, automatic=True, tracked=tracked)


def _unlinked(path: Path | None, option: str) -> Path | None:
    """A path that the user has not chosen. Raises StoreError if it is a link."""
    if path is not None and path.is_symlink():
        raise StoreError(
            f"{path} is a link, and healcore follows no link at a path that it has chosen itself: "
            f"remove it, or name the file that it leads to with {option}="
        )
    return path
