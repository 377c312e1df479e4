"""What the monitor logs about steps, and which batches a rollback skips."""

from __future__ import annotations

from typing import Any

import pytest

from healcore.core.verdict import Action, Cause
from healcore.events import Log
from healcore.runtime.data import BatchId
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import StepResult
from healcore.runtime.incidents.hooks import Hooks, RunFacts
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Alone
from tests.healer.step_records import record

FINE = record()
NAN = {"cause": Cause.NONFINITE_LOSS, "skip": True, "action": Action.ALERT}


class Run:
    """The monitor of a run, and what it has said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], policy: str = "default") -> None:
        self._capsys = capsys
        self.log = RunLog(Log(None), console=True)
        self.monitor = IncidentMonitor(
            policy=HostPolicy.of(policy),
            ledger=Ledger(),
            hooks=Hooks(),
            ranks=Alone(),
            log=self.log,
            facts=RunFacts,
            learning_rate=lambda: 0.001,
        )
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


def test_clipped_steps_without_an_alarm_say_nothing(run: Run):
    assert run.steps(200, grad_scale=0.9) == []
    assert run.monitor.metrics.values()["heal/clips"] == 200


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


def test_a_resumed_run_goes_on_counting(run: Run):
    tally = {"clips": 3, "skips": 98, "lr_cuts": 0, "rollbacks": 0, "alarms": 98}
    run.monitor.sync_engines({"model": {"state": {"tally": tally, "lr": {"scale": 1.0}}}})
    assert run.steps(5) == []
    said = run.steps(4, incident=1, incident_open=True, **NAN)
    assert [line.split("; ")[-1] for line in said] == [
        "skipped, 99 of the run",
        "skipped, 100 of the run",
    ]
    assert run.monitor.metrics.values()["heal/skips"] == 102


def test_each_of_the_first_incidents_is_said_and_later_ones_at_powers_of_two(run: Run):
    said = []
    for number in range(1, 41):
        said.append(len(run.steps(1, incident=number, **NAN)))
        run.steps(3, incident=number)
    assert [number for number, lines in enumerate(said, 1) if lines] == [*range(1, 11), 16, 32]


def test_outliers_that_were_only_clipped_are_said_at_powers_of_ten(run: Run):
    alert = {"cause": Cause.GRAD_SPIKE, "grad_scale": 0.01}
    lines = [line for _ in range(100) for line in run.steps(1, **alert) + run.steps(1)]
    assert [line.split(":")[1] for line in lines] == [" step 0", " step 18", " step 198"]
    assert lines[0].endswith("grad spike; gradient norm 0, learning rate 0.001; gradients × 0.01")


def test_every_cut_of_the_learning_rate_is_said_also_within_one_incident(
    capsys: pytest.CaptureFixture[str],
):
    """As for the third trouble of a run, which gets an alert and a cut and no rollback."""
    run = Run(capsys, "pretraining")
    cut = {"cause": Cause.INSTABILITY, "action": Action.ALERT | Action.CUT_LR}
    one = {"incident": 1, "incident_open": True}
    run.steps(1, **one, **cut, lr_scale=0.25)
    run.steps(30, **one, cause=Cause.INSTABILITY, lr_scale=0.25)
    (line,) = run.steps(1, **one, **cut, lr_scale=0.0625)
    assert line.startswith("healcore: step 31: incident 1: instability; ")
    assert "; learning rate × 0.0625; no rollback is left in the budget" in line
    assert run.monitor.metrics.values()["heal/lr_cuts"] == 2


def test_observe_mode_says_what_was_ordered(capsys: pytest.CaptureFixture[str]):
    run = Run(capsys, "observe")
    order = {"cause": Cause.INSTABILITY, "action": Action.ROLLBACK | Action.CUT_LR}
    (line,) = run.steps(1, incident=1, incident_open=True, **order)
    assert line.endswith("ROLLBACK and CUT_LR ordered; nothing is changed, the policy observes")


def test_without_a_loss_the_line_has_none(run: Run):
    (line,) = run.steps(1, **NAN, loss=0.0)
    assert "nonfinite loss; gradient norm " in line
    assert " loss 0" not in line


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
