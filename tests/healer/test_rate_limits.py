"""The limit of the learning rate after a rollback, in the steps, report, events and on the screen.

The schedule warms up for 40 steps. Steps 35 to 38 are NaN, and the third of them, step 37, cuts the
rate to a quarter. The rollback to step 0 repeats the warm-up, whose first rates are lower than this
limit anyway. So the limit has to be named, and no factor: a factor of 1/4 is not in force there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Healer
from healcore import policy as policies
from healcore.runtime.healing_report import HealingReport
from healcore.torch.trainers.hook import healings_of
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, train

RATE, CUT = 0.01, 0.25


def warm_up(step: int) -> float:
    """The share of `RATE` that the schedule has at a step."""
    return min(1.0, ((step + 1) / 40) ** 3)


LIMIT = CUT * RATE * warm_up(37)


@dataclass(frozen=True)
class LimitedRun:
    """A run whose rate was limited by a rollback."""

    folder: Path
    """Has the events."""
    rates: dict[int, float]
    """Step -> the rate that the step had, at its last attempt."""
    report: HealingReport
    """The report after the end."""
    screen: str
    """What the run has written to standard error."""


@pytest.fixture
def limited_run(tmp_path, capsys) -> LimitedRun:
    loop = loop_of("torch", Faults(once=range(35, 39)))
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, warm_up)
    loop.state["scheduler"] = loop.scheduler
    cut = {"to": ["nonfinite"], "do": ["rollback", "cut_lr"], "when": {"consecutive": 3}}
    policy = policies.load(
        "default",
        rollback={"confirm": False, "probation": 20},
        incident={"quiet_steps": 3},
        respond=[{"to": ["nonfinite"], "do": ["skip"]}, cut],
    )
    rates: dict[int, float] = {}
    healers: list[Healer] = []

    def before(healer: Any, number: int) -> None:
        healers[:] = [healer]
        step = healer.step - 1
        decision = healings_of(healer)["optimizer"].last_decision()
        if decision is not None:  # after the first step
            rates[step] = RATE * warm_up(step) * float(decision.lr_scale)

    logging = {"events": tmp_path / "healcore.events.jsonl", "console": True}
    train(loop, policy, range(70), before=before, **logging)
    return LimitedRun(tmp_path, rates, healers[0].report(), capsys.readouterr().err)


def test_no_step_after_the_rollback_is_above_the_limit_and_the_first_ones_follow_the_schedule(
    limited_run,
):
    assert max(limited_run.rates.values()) == pytest.approx(LIMIT)
    assert limited_run.rates[1] == pytest.approx(RATE * warm_up(1))


def test_the_report_and_the_event_have_the_rate_before_the_limit_and_the_factor_in_force(
    limited_run,
):
    (done,) = limited_run.report.rollbacks
    assert (done.step, done.checkpoint, done.lr_scale) == (39, 0, 1.0)
    assert (done.lr, done.lr_limit) == pytest.approx((RATE, LIMIT))
    (event,) = events(limited_run.folder, "rollback")
    assert (event["lr"], event["lr_limit"], event["lr_scale"]) == (done.lr, done.lr_limit, 1.0)


def test_the_alarm_that_cuts_the_rate_says_so(limited_run):
    (cut,) = [each for each in events(limited_run.folder, "alarm") if "CUT_LR" in each["action"]]
    assert (cut["step"], cut["lr_scale_before"], cut["lr_scale"]) == (37, 1.0, CUT)


def test_the_line_on_the_screen_names_the_limit_and_no_factor(limited_run):
    (line,) = (
        each
        for each in limited_run.screen.splitlines()
        if "rolled back" in each and "completed" not in each
    )
    assert f"learning rate at most {LIMIT:.3g} (it was 0.01)" in line
    assert len(line) <= 160
    assert "×" not in line
