"""The choice of the checkpoint and of the trial; hooks; what the monitor and the ledger keep."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.core.decision import Action, Cause, Decision
from healcore.core.engine import incidents
from healcore.events import Log
from healcore.policy import load
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.healthy_ranges import RATE_TOLERANCE
from healcore.runtime.run.monitor import IncidentMonitor
from healcore.runtime.run.monitor_state import MonitorState
from healcore.runtime.run.orders import Order, RepeatChanges, RollbackRecord
from healcore.runtime.run.rollback.host_rules import HostRules
from healcore.runtime.run.rollback.next_trial import MAX_HOLDS, Trial, TroubleFacts, next_trial
from healcore.runtime.run.run_record import Ledger
from healcore.runtime.run.steps import DelayedReader, StepResult
from healcore.runtime.run_options import Hooks, HostPolicy, IncidentContext
from healcore.runtime.store.checkpoints import CheckpointInfo, NoGoodCheckpoint, choose_checkpoints
from tests.events.sample_events import READINGS
from tests.healer.step_records import record
from tests.runtime.run.bare_run import bare_run


def saved(step: int, status: Any = "good", finite: bool = True) -> CheckpointInfo:
    return CheckpointInfo(step, status, 1, 0.0, 1, None, () if finite else ("w",))


GOOD = [saved(0, "candidate"), saved(100), saved(200), saved(300), saved(400, "candidate")]


@pytest.mark.parametrize(
    ("saves", "facts", "found"),
    [
        (GOOD, {"onset": 350}, (300, 200, 100)),  # a candidate is not known-good
        # Saved before the step of the onset was taken.
        (GOOD, {"onset": 300}, (300, 200, 100)),
        (GOOD, {"onset": 299, "depth": 0}, (200, 100)),
        (GOOD, {"onset": 350, "depth": 2}, (200, 100)),
        (GOOD, {"onset": 350, "depth": 9}, (100,)),  # as deep as it goes
        (GOOD, {"onset": 360, "tried": [300]}, (200, 100)),
        # What became good on the way back into the same trouble is not gone back to.
        ([*GOOD, saved(340)], {"onset": 345, "tried": [300]}, (200, 100)),
        ([*GOOD, saved(340)], {"onset": 345, "tried": [300], "depth": 4}, (100,)),
        # No deeper checkpoint: the same one again, or the run's first snapshot.
        (GOOD, {"onset": 160, "tried": [100]}, (100,)),
        (GOOD, {"onset": 160, "tried": [100], "initial": [0]}, (0,)),
        (GOOD, {"onset": 160, "tried": [100, 0], "initial": [0]}, (0,)),
        (GOOD, {"onset": 350, "initial": [0]}, (300, 200, 100, 0)),
        (GOOD[:1], {"onset": 5, "initial": [0]}, (0,)),
        (
            [saved(0), saved(100, "abandoned"), saved(200, finite=False)],
            {"onset": 300, "initial": [100]},
            (0,),
        ),
    ],
)
def test_the_choice_of_a_checkpoint(saves, facts, found):
    assert choose_checkpoints(saves, **facts) == found


@pytest.mark.parametrize(
    ("saves", "initial", "said"),
    [
        (GOOD[:1], [], r"onset at step 5.*there: 0 \(candidate\)"),
        ([saved(0, "abandoned")], [0], "there: 0"),
        ([saved(0, "candidate", finite=False)], [0], "not finite"),
        ([], [0], "there: none"),
    ],
)
def test_no_checkpoint_can_be_chosen(saves, initial, said):
    with pytest.raises(NoGoodCheckpoint, match=said):
        choose_checkpoints(saves, onset=5, initial=initial)


RATES = st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=1)
FACTS = st.builds(
    TroubleFacts,
    rates=st.lists(RATES, max_size=3),
    healthy_rates=RATES,
    from_start=st.booleans(),
    unusual=st.booleans(),
    max_rate_limits=st.integers(0, 4),
)


def expected_trial(tried: list[Trial], facts: TroubleFacts) -> Trial:
    """Written independently of `next_trial`: the first of these trials whose condition holds."""
    known = {"a": 0.0, "b": 0.0} | dict(facts.healthy_rates)
    above = any(
        rate > known[n] * RATE_TOLERANCE for rates in facts.rates for n, rate in rates.items()
    )
    cut_left = tried.count(Trial.LIMIT_RATE) < facts.max_rate_limits
    hold_left = tried.count(Trial.HOLD) < MAX_HOLDS
    in_order = (
        (Trial.LIMIT_RATE, cut_left and (above or facts.from_start)),
        (Trial.REPEAT, not tried),
        (Trial.HOLD, facts.unusual and hold_left),
        (Trial.LIMIT_RATE, cut_left and not facts.rates),
        (Trial.ACCEPT, True),
    )
    return next(trial for trial, holds in in_order if holds)


@given(st.lists(st.sampled_from([*Trial][:-1]), max_size=6), FACTS)
def test_the_first_trial_in_order_whose_condition_holds(tried, facts):
    assert next_trial(tried, facts) == expected_trial(tried, facts)


def test_what_is_unusual_is_held_before_an_unknown_rate_is_limited():
    """A limit lasts, and cannot cure a gradient times 4096. Plain optax hides its rates."""
    facts = TroubleFacts((), {}, from_start=False, unusual=True, max_rate_limits=4)
    tried: list[Trial] = []
    while Trial.ACCEPT not in tried:
        tried.append(next_trial(tried, facts))
    limits = [Trial.LIMIT_RATE] * 4
    assert tried == [Trial.REPEAT, Trial.HOLD, Trial.HOLD, *limits, Trial.ACCEPT]


FINE = record()
NAN = {"cause": Cause.NONFINITE_LOSS, "skip": True, "action": Action.ALERT}


@pytest.fixture
def monitor() -> IncidentMonitor:
    log = RunLog(Log(None), console=True)
    driver: Any = SimpleNamespace(trained_rates=dict)
    run = bare_run(log, driver)
    return IncidentMonitor(
        policy=run.policy,
        driver=driver,
        ranks=run.ranks,
        log=log,
        ledger=run.ledger,
        state=run.record.monitor,
        hooks=Hooks(),
        save_every=run.policy.rollback.probation,
    )


def steps(monitor: IncidentMonitor, number: int, **changes: Any) -> None:
    first = monitor._ledger.next_step
    for index in range(first, first + number):
        each = FINE._replace(step=index + 1, **changes)
        monitor.process(StepResult(index, [each], ()))


def test_skips_of_one_long_incident_are_said_at_powers_of_ten(monitor, capsys):
    steps(monitor, 5)
    steps(monitor, 1000, incident=1, incident_open=True, **NAN)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("healcore: step 5: incident 1: nonfinite loss; ")
    assert "; skipped. The loss itself was NaN or Inf" in lines[0]
    assert [line.split("; ")[-1] for line in lines[1:]] == [
        "skipped (10 so far)",
        "skipped (100 so far)",
        "skipped (1,000 so far)",
    ]


@pytest.mark.parametrize(("back_to", "skipped"), [(None, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4, 5])])
def test_ids_of_an_earlier_loader_are_not_skipped_in_the_current_one(monitor, back_to, skipped):
    """Steps 0 to 5 have batches of one loader, and those from 6 on of another one."""
    start = 6
    for index in range(start):
        monitor.process(StepResult(index, [FINE], (BatchId(0, 100 + index),)))
    monitor.state.loader_start = start
    if back_to is not None:  # the second loader begins again there
        monitor.state.on_rollback(back_to)
        start = back_to
    for index in range(start, 10):
        monitor.process(StepResult(index, [FINE], (BatchId(0, index - start),)))
    assert [each.index for each in monitor.state.batches_between(0, 9)] == skipped


def test_an_incident_that_is_over_has_one_event_and_one_line(monitor, capsys):
    steps(monitor, 5)
    steps(monitor, 3, incident=1, incident_open=True, **NAN)
    capsys.readouterr()
    steps(monitor, 9)
    assert capsys.readouterr().err == ""
    steps(monitor, 30, loss=0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 17: incident 1 is over: nonfinite loss, steps 5 to 7; loss 0.5" in line
    (incident,) = monitor._log.history.incidents
    assert incident.over
    assert not monitor.is_unhealthy


@pytest.mark.parametrize("cause", [Cause.PLATEAU, Cause.GRAD_VANISHING])
def test_a_lasting_alarm_at_the_end_is_not_over(monitor, cause):
    steps(monitor, 30, cause=cause, action=Action.ALERT)
    assert monitor.is_unhealthy, "report().converged is false"
    steps(monitor, 1)
    assert not monitor.is_unhealthy


def test_batches_of_an_undone_accumulation_belong_to_no_later_step():
    reader = DelayedReader()
    found: list[StepResult] = []
    for judged in (False, True):
        read: Any = SimpleNamespace(read=lambda j=judged: [[record(judged=j)]], count=1)
        read.vote_requested = False
        reader.push(read, StepResult(0, [], (BatchId(0, int(judged)),)))
        found = [*reader.read_all()]
        reader.forget_accumulation()
    assert found[0].batches == (BatchId(0, 1),)


def host_rules() -> HostRules:
    policy = HostPolicy.of("default", {"incident": {"quiet_steps": 10}})
    return HostRules(policy.host_rules, policy.engine.config, MonitorState())


def orders(found: HostRules, bad: Sequence[int], engine: str = "", start: int = 0) -> list[int]:
    """Steps at which the host looks at the weights; `bad` has 1 for a step that is not finite."""
    due = []
    for step, is_bad in enumerate(bad, start):
        cause = Cause.NONFINITE_LOSS if is_bad else Cause(0)
        each = FINE._replace(step=step + 1, cause=cause, skip=bool(is_bad), engine=engine)
        if found.with_rollback_order(each).action & Action.ROLLBACK:
            due.append(step)
    return due


@pytest.mark.parametrize(
    ("bad", "due"),
    [
        ([0] * 20 + [1] * 300, [29]),  # ten in a row are one order, however long it goes on
        (([1] * 9 + [0]) * 2, []),
        ([1, 0] * 100, [48]),  # every other step is one order at the twenty-fifth
        ([1] * 10 + [0] * 100 + [1] * 10, [9, 119]),  # after a quiet time another one
    ],
)
def test_rows_of_steps_that_are_not_finite(bad: list[int], due: list[int]):
    assert orders(host_rules(), bad) == due


def test_hits_are_counted_for_each_optimizer():
    found = host_rules()
    for step in range(9):
        assert orders(found, [1], "a", step) == orders(found, [0], "b", step) == []
    assert orders(found, [1], "b", 9) == []
    assert orders(found, [1], "a", 9) == [9]


def test_a_rule_for_finite_steps_and_one_that_also_skips_stay_in_the_step():
    policy = load("default", respond=[{"to": ["loss_spike", "nonfinite"], "do": ["rollback"]}])
    assert policy.host_rules() == ()
    assert [each.action for each in policy.config().rules] == [Action.ROLLBACK]
    policy = load("default", respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"]}])
    assert [each.action for each in policy.host_rules()] == [Action.ROLLBACK]
    (of_step,) = policy.config().rules
    assert (of_step.skip, of_step.action, np.asarray(of_step.consecutive)) == (True, 0, 1)


ORDERED = Action.ROLLBACK | Action.CUT_LR
DECISION = Decision(1.0, True, 0.5, ORDERED, Cause.LOSS_SPIKE, 1)
INCIDENT = IncidentContext(2, 9, 7, Cause.LOSS_SPIKE, DECISION, READINGS)


def nothing(incident):
    return Action(0)


def test_each_hook_sees_the_result_so_far_and_the_last_result_counts():
    seen = []
    look = seen.append

    def stop(incident: Any) -> Action:
        return Action.STOP

    assert Hooks(look).run(INCIDENT) == (None, "", [])
    assert seen == [INCIDENT]
    action, hook, problems = Hooks([stop, look, nothing, look]).run(INCIDENT)
    assert [each.action for each in seen] == [ORDERED, Action.STOP, Action(0)]
    assert (action, problems) == (Action(0), [])
    assert hook.endswith("test_orders.nothing")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("error", [ValueError, Unprintable])
def test_an_exception_is_contained_and_reported(error):
    def raising(incident):
        raise error

    action, _, problems = Hooks([raising, nothing, raising]).run(INCIDENT)
    assert action == Action(0), "the other hooks still count"
    assert len(problems) == 2
    assert error.__name__ in problems[0]
    assert "<locals>.raising" in problems[0]


@pytest.mark.parametrize("returned", [True, 4, "rollback", Action(1024), Cause.DATA])
def test_a_value_that_is_no_action_counts_as_no_result(returned):
    action, _, problems = Hooks(lambda incident: returned).run(INCIDENT)
    assert action is None
    assert "Action.ROLLBACK" in problems[0]


SKIPPED = record(cause=Cause.NONFINITE_GRAD, skip=True)
MICRO_STEP = record(judged=False)


@pytest.mark.parametrize(("last", "onset"), [(MICRO_STEP, 3), (record(), 13)])
def test_a_row_goes_on_through_the_micro_steps_of_an_accumulation(last, onset):
    """Skipped steps would seem interrupted, and the trouble to begin later than it did."""
    ledger = Ledger()
    update = [MICRO_STEP, MICRO_STEP, MICRO_STEP, SKIPPED]
    for index, each in enumerate([*update, *update, *update, last]):
        ledger.add_step(index, [each])
    assert ledger.first_consecutive(ledger.next_step - 1) == onset


@pytest.mark.parametrize("alert", [Cause.RECORDS, Cause.DIVERGENCE])
def test_an_alert_without_consequences_begins_no_incident_within_skipped_steps(alert):
    """One long incident would be told as many, each with an onset of its own."""
    ledger = Ledger()
    opening = incidents.incident_causes(load("default").engine().config)
    for index in range(3, 13):
        both = record(cause=Cause.NONFINITE_GRAD | alert, skip=True)
        ledger.add_step(index, [both if index == 6 else SKIPPED], opening)
    (only,) = ledger.incidents
    assert (only.onset, only.only_skips, ledger.first_consecutive(12)) == (3, True, 3)


def test_trouble_that_begins_where_the_run_has_been_is_the_same_again():
    """Its trials go on where they were. As new trouble it would get the first trial again."""
    ledger = Ledger()
    order = Order(index=0, onset=250, changes=RepeatChanges(lr_at_fault={"": 0.1}))
    back = RollbackRecord(order=order, continues_at=100, step=420)
    ledger.on_rollback(back, None)
    assert ledger.same_trouble(199) == ledger.same_trouble(420) == [back]
    assert ledger.same_trouble(421) == ledger.same_trouble(521, within=100) == []
    assert ledger.same_trouble(520, within=100) == [back]
