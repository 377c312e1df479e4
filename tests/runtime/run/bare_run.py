"""A run without a Healer, of the parts that a test needs."""

from typing import Any

from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.checkpoints.schedule import SaveSchedule
from healcore.runtime.run.dispatch_queue import DispatchQueue
from healcore.runtime.run.out_of_memory import OutOfMemory
from healcore.runtime.run.progress import RunProgress
from healcore.runtime.run.run import Run
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.ranks import Alone


def bare_run(log: RunLog, driver: Driver, *, policy: Any = "default", store: Any = None) -> Run:
    """The run of one process. The test sets the parts that it uses."""
    run = object.__new__(Run)
    run.policy = policy if isinstance(policy, HostPolicy) else HostPolicy.of(policy)
    no_store: Any = driver
    run.driver, run.store = driver, no_store if store is None else store
    run.ranks, run.log, run.claims = Alone(), log, ()
    run.record, run.progress, run.end = RunRecord(), RunProgress(), None
    run.dispatch_queue = DispatchQueue(run.progress)
    run.out_of_memory = OutOfMemory(run)
    return run


def schedule_of(run: Run, every: int) -> SaveSchedule:
    """The schedule of the saves of a run."""
    return SaveSchedule(run, every)
