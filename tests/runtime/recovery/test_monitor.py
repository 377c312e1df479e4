"""What the monitor logs about steps, which batches a rollback skips, and the host's own rules."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from healcore.events import Log
from healcore.policy import load
from healcore.runtime.data import BatchId
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.steps import HostRules, StepResult
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.run_log import RunLog
from healcore.runtime.run_options import Hooks
from healcore.runtime.store.ranks import Alone
from tests.healer.step_records import record

FINE = record()
NAN = {"cause": Cause.NONFINITE_LOSS, "skip": True, "action": Action.ALERT}


class Run:
    """The monitor of a run, and what it has said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], policy: str = "default") -> None:
        self._capsys = capsys
        self.log = RunLog(Log(None), console=True)
        driver = SimpleNamespace(learning_rate=lambda: 0.001)
        run = {"policy": HostPolicy.of(policy), "ranks": Alone(), "log": self.log}
        saver: Any = SimpleNamespace(**run, ledger=Ledger(), driver=driver, every=0)
        self.monitor = IncidentMonitor(saver, Hooks())
        self._step = 0

    def steps(self, number: int, **changes: Any) -> list[str]:
        """The lines of some equal steps."""
        for _ in range(number):
            self._step += 1
            each = FINE._replace(step=self._step, **changes)
            self.monitor.process(StepResult(self._step - 1, [each], ()))
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A run under the default policy."""
    return Run(capsys)


def test_skips_of_one_long_incident_are_said_at_powers_of_ten(run: Run):
    run.steps(5)
    lines = run.steps(1000, incident=1, incident_open=True, **NAN)
    assert len(lines) == 4
    assert lines[0].startswith("healcore: step 5: incident 1: nonfinite loss; ")
    assert lines[0].endswith("; skipped")
    assert [line.split("; ")[-1] for line in lines[1:]] == [
        "skipped, 10 of the run",
        "skipped, 100 of the run",
        "skipped, 1000 of the run",
    ]


@pytest.mark.parametrize(("back_to", "skipped"), [(None, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4, 5])])
def test_ids_of_an_earlier_loader_are_not_skipped_in_the_current_one(
    capsys: pytest.CaptureFixture[str], back_to: int | None, skipped: list[int]
):
    """Steps 0 to 5 have batches of one loader, and those from 6 on of another one."""
    monitor = Run(capsys).monitor
    for index in range(6):
        monitor.process(StepResult(index, [FINE], (BatchId(0, 100 + index),)))
    start = 6
    monitor.begin_loader(start)
    if back_to is not None:  # the second loader begins again there
        monitor.on_rollback(back_to)
        start = back_to
    for index in range(start, 10):
        monitor.process(StepResult(index, [FINE], (BatchId(0, index - start),)))
    assert [each.index for each in monitor.batches_between(0, 9)] == skipped


def test_an_incident_that_is_over_has_one_event_and_one_line(run: Run):
    run.steps(5)
    run.steps(3, incident=1, incident_open=True, **NAN)
    assert run.steps(9) == []
    (line,) = run.steps(30, loss=0.5)
    assert "step 17: incident 1 is over: nonfinite loss, steps 5 to 7; loss 0.5" in line
    (incident,) = run.log.run.incidents
    assert incident.over
    assert not run.monitor.is_unhealthy


@pytest.mark.parametrize("cause", [Cause.PLATEAU, Cause.GRAD_VANISHING])
def test_a_lasting_alarm_at_the_end_is_not_over(run: Run, cause: Cause):
    run.steps(50)
    run.steps(30, cause=cause, action=Action.ALERT)
    assert run.monitor.is_unhealthy, "report().converged is false"
    run.steps(1)
    assert not run.monitor.is_unhealthy


# -- rules of the host: when it looks at the weights because of steps with NaN or Inf -----------


QUIET = 10


def host_rules() -> HostRules:
    policy = HostPolicy.of("default", {"incident": {"quiet_steps": QUIET}})
    return HostRules(policy.rules, policy.engine.config)


def orders(found: HostRules, bad: Sequence[int], engine: str = "", start: int = 0) -> list[int]:
    """Steps at which the host looks at the weights; `bad` has 1 for a step that is not finite."""
    due = []
    for step, is_bad in enumerate(bad, start):
        cause = Cause.NONFINITE_LOSS if is_bad else Cause(0)
        each = FINE._replace(step=step + 1, cause=cause, skip=bool(is_bad), engine=engine)
        if found.ordered(each).action & Action.ROLLBACK:
            due.append(step)
    return due


def test_ten_in_a_row_are_one_order_however_long_it_goes_on():
    assert orders(host_rules(), [0] * 20 + [1] * 300) == [29]
    assert orders(host_rules(), ([1] * 9 + [0]) * 2) == []


def test_every_other_step_is_one_order_at_the_twenty_fifth():
    assert orders(host_rules(), [1, 0] * 100) == [48]


def test_another_row_after_a_quiet_time_is_another_order():
    assert orders(host_rules(), [1] * 10 + [0] * 100 + [1] * 10) == [9, 119]


def test_hits_are_counted_for_each_optimizer():
    found = host_rules()
    for step in range(9):
        assert orders(found, [1], "a", step) == orders(found, [0], "b", step) == []
    assert orders(found, [1], "b", 9) == []
    assert orders(found, [1], "a", 9) == [9]


def test_a_rollback_forgets_the_hits():
    found = host_rules()
    assert orders(found, [1] * 9) == []
    found.restart()
    assert orders(found, [1] * 10) == [9]


def test_a_rule_for_finite_steps_and_one_that_also_skips_stay_in_the_step():
    rule = {"to": ["loss_spike", "nonfinite"], "do": ["rollback"]}
    policy = load("default", respond=[rule])
    assert policy.host_rules() == ()
    assert [each.action for each in policy.config().rules] == [Action.ROLLBACK]
    rule = {"to": ["nonfinite"], "do": ["skip", "rollback"]}
    policy = load("default", respond=[rule])
    assert [each.action for each in policy.host_rules()] == [Action.ROLLBACK]
    (of_step,) = policy.config().rules
    assert (of_step.skip, of_step.action) == (True, 0)
    assert np.asarray(of_step.consecutive) == 1
