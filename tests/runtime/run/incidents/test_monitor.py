"""What the monitor says about incidents, and which batches it keeps."""

from typing import Any

import pytest

from healcore.core.decision import Action, Cause
from healcore.core.step_record import Why
from healcore.events import Log
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.incidents.monitor import IncidentMonitor
from healcore.runtime.run.incidents.rate_log import RateLog
from healcore.runtime.run.monitor_state import MonitorState
from healcore.runtime.run.record.ledger import Ledger
from healcore.runtime.run.run import Run
from healcore.runtime.run_options import Hooks
from tests.healer.step_records import record
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run

NAN_ALARM = {"cause": Cause.NONFINITE_LOSS, "why": Why.POLICY, "action": Action.ALERT}
"""What the record of a step says whose loss is NaN, and which is skipped."""
IN_INCIDENT = {**NAN_ALARM, "incident": 1, "incident_open": True}


@pytest.fixture
def run() -> Run:
    """A run without checkpoints. Its lines are on standard error."""
    return bare_run(RunLog(Log(None), console=True), BareDriver())


@pytest.fixture
def monitor(run: Run) -> IncidentMonitor:
    return IncidentMonitor(
        policy=run.policy,
        driver=run.driver,
        rate_log=RateLog(run.driver, run.log, state=MonitorState(), observes=run.policy.observes),
        ranks=run.ranks,
        log=run.log,
        ledger=run.ledger,
        state=run.record.monitor,
        hooks=Hooks(),
        save_every=run.policy.rollback.probation,
    )


def process_steps(monitor: IncidentMonitor, ledger: Ledger, count: int, **changes: Any) -> None:
    """Gives the monitor the next `count` steps; `changes` are to the record of a healthy step."""
    first = ledger.next_step
    for index in range(first, first + count):
        monitor.note_step(StepResult(index, [record(step=index + 1, **changes)], ()))


def process_batches(monitor: IncidentMonitor, steps: range, first_batch: int) -> None:
    """Gives the monitor healthy steps with consecutive batches of epoch 0."""
    for batch, index in enumerate(steps, first_batch):
        monitor.note_step(StepResult(index, [record()], (BatchId(0, batch),)))


def test_skips_of_one_long_incident_are_said_at_powers_of_ten(run, monitor, capsys):
    process_steps(monitor, run.ledger, 5)
    process_steps(monitor, run.ledger, 1000, **IN_INCIDENT)

    first, *later = capsys.readouterr().err.splitlines()
    assert first.startswith("healcore: step 5: incident 1: nonfinite loss; ")
    assert "; skipped. The loss itself was NaN or Inf" in first
    assert [line.split("; ")[-1] for line in later] == [
        "skipped (10 so far)",
        "skipped (100 so far)",
        "skipped (1,000 so far)",
    ]


@pytest.mark.parametrize(
    ("back_to", "skipped"),
    [
        pytest.param(None, [0, 1, 2, 3], id="without a rollback"),
        pytest.param(4, [0, 1, 2, 3, 4, 5], id="after a rollback to step 4"),
    ],
)
def test_ids_of_an_earlier_loader_are_not_skipped_in_the_current_one(monitor, back_to, skipped):
    """Both loaders count their batches from 0 on, so that an id alone does not tell the loader."""
    start = 6  # of the second loader
    process_batches(monitor, range(start), first_batch=100)
    monitor.state.loader_start = start
    if back_to is not None:  # the second loader begins again there
        monitor.state.on_rollback(back_to)
        start = back_to
    process_batches(monitor, range(start, 10), first_batch=0)

    found = monitor.state.batches_between(0, 9)
    assert [batch.index for batch in found] == skipped


def test_an_incident_that_is_over_has_one_event_and_one_line(run, monitor, capsys):
    process_steps(monitor, run.ledger, 5)
    process_steps(monitor, run.ledger, 3, **IN_INCIDENT)
    capsys.readouterr()

    process_steps(monitor, run.ledger, 9)  # it takes ten
    assert capsys.readouterr().err == ""

    process_steps(monitor, run.ledger, 30, loss=0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 17: incident 1 is over: nonfinite loss, steps 5 to 7; loss 0.5" in line
    (incident,) = run.log.history.incidents
    assert incident.over
    assert not monitor.is_unhealthy


@pytest.mark.parametrize(
    "cause", [Cause.PLATEAU, Cause.GRAD_VANISHING], ids=lambda cause: cause.name
)
def test_a_lasting_alarm_is_over_at_the_first_step_without_it(run, monitor, cause):
    process_steps(monitor, run.ledger, 30, cause=cause, action=Action.ALERT)
    assert monitor.is_unhealthy, "report().converged is false"
    process_steps(monitor, run.ledger, 1)
    assert not monitor.is_unhealthy
