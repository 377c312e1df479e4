"""A run without a Healer, of the parts that a test needs."""

from typing import Any

from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.batch_parts import BatchParts
from healcore.runtime.run.checkpoints.schedule import SaveSchedule
from healcore.runtime.run.run import Run
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.ranks import Alone


def bare_run(log: RunLog, driver: Driver, *, policy: Any = "default", store: Any = None) -> Run:
    """The run of one process. The test sets the parts that it uses."""
    record = RunRecord()
    nothing: Any = None
    no_store: Any = driver
    return Run(
        policy=policy if isinstance(policy, HostPolicy) else HostPolicy.of(policy),
        driver=driver,
        store=no_store if store is None else store,
        ranks=Alone(),
        log=log,
        record=record,
        end_requests=nothing,
        claims=(),
        batch_parts=BatchParts(record),
    )


def schedule_of(run: Run, every: int) -> SaveSchedule:
    """The schedule of the saves of a run."""
    return SaveSchedule(run, every)
