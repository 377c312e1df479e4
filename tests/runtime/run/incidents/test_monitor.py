"""What the monitor says about incidents."""

from typing import Any

import pytest

from healcore.core.decision import Action, Cause
from healcore.core.step_record import Why
from healcore.events import Log
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.incidents.metrics import RunMetrics
from healcore.runtime.run.incidents.monitor import IncidentMonitor
from healcore.runtime.run.run import Run
from healcore.runtime.run_options import Hooks
from tests.healer.step_records import record
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run, schedule_of

NAN_ALARM = {"cause": Cause.NONFINITE_LOSS, "why": Why.POLICY}
"""What the record of a step says whose loss is NaN, and which is skipped."""
IN_INCIDENT = {**NAN_ALARM, "incident": 1, "incident_open": True}


@pytest.fixture
def run() -> Run:
    """A run without checkpoints. Its lines are on standard error."""
    return bare_run(RunLog(Log(None), console=True), BareDriver())


@pytest.fixture
def monitor(run: Run) -> IncidentMonitor:
    run.schedule = schedule_of(run, run.policy.rollback.probation)
    run.metrics = RunMetrics(run)
    run.monitor = IncidentMonitor(run, Hooks())
    return run.monitor


def process_steps(monitor: IncidentMonitor, run: Run, count: int, **changes: Any) -> None:
    """Gives the monitor the next `count` steps; `changes` are to the record of a healthy step."""
    first = run.journal.next_step
    for index in range(first, first + count):
        monitor.note_step(StepResult(index, [record(step=index + 1, **changes)], ()))


def test_skips_of_one_long_incident_are_said_at_powers_of_ten(run, monitor, capsys):
    process_steps(monitor, run, 5)
    process_steps(monitor, run, 1000, **IN_INCIDENT)

    first, page, *later = capsys.readouterr().err.splitlines()
    assert first.startswith("healcore: step 5: incident 1: nonfinite loss; ")
    assert first.endswith("; skipped")
    assert page.endswith("what to check: docs/faults.md#nan_loss")
    assert [line.split("; ")[-1] for line in later] == [
        "skipped (10 so far)",
        "skipped (100 so far)",
        "skipped (1,000 so far)",
    ]


def test_an_incident_that_is_over_has_one_event_and_one_line(run, monitor, capsys):
    process_steps(monitor, run, 5)
    process_steps(monitor, run, 3, **IN_INCIDENT)
    capsys.readouterr()

    process_steps(monitor, run, 9)  # it takes ten
    assert capsys.readouterr().err == ""

    process_steps(monitor, run, 30, loss=0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 17: incident 1 is over: nonfinite loss, steps 5 to 7; loss 0.5" in line
    (incident,) = run.log.history.incidents
    assert incident.cause == ("NONFINITE_LOSS",)
    assert not monitor.is_unhealthy


@pytest.mark.parametrize(
    "cause", [Cause.PLATEAU, Cause.GRAD_VANISHING], ids=lambda cause: cause.name
)
def test_a_lasting_alarm_is_over_at_the_first_step_without_it(run, monitor, cause):
    process_steps(monitor, run, 30, cause=cause, action=Action.ALERT)
    assert monitor.is_unhealthy, "report().converged is false"
    process_steps(monitor, run, 1)
    assert not monitor.is_unhealthy
