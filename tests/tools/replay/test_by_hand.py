"""Compares a replay with the engine driven row by row, without any of the replay's code."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.core.verdict import Action, Cause
from healcore.policy import load, loads
from healcore.tools.replay import replay
from healcore.tools.report.page import outcome
from tests.healer.training_loops import rules
from tests.tools.replay import logs

OVERFIT = """
schema = 1
name = "overfit"
clip = { kind = "autoclip", window = 50 }
respond = [
    { to = ["nonfinite", "update_spike"], do = ["skip"] },
    { to = ["overfit"], do = ["alert", "save"] },
]
detect = { nonfinite = {}, overfit = { max_gap = 0.5 }, update_spike = {} }
"""
ADAGC = """
schema = 1
name = "adagc"
clip = { kind = "adagc" }
detect = { nonfinite = {}, loss_spike = {} }
respond = [
    { to = ["nonfinite", "loss_spike"], do = ["skip", "alert"] },
    { to = ["loss_spike"], when = { sustained = true }, do = ["rollback", "cut_lr"] },
]
"""


def rows_of(path: Path):
    with path.open() as file:
        return list(csv.DictReader(file))


def step(engine: Engine, state, row):
    """(state, decision), or None where the row has nothing to judge."""
    signals = {
        name: np.asarray(float(row[name]), np.float32)
        for name in ("loss", "grad_norm")
        if row.get(name, "") != ""
    }
    if not signals:
        return None
    if "eval_loss" in row:
        signals["eval_loss"] = np.asarray(float(row["eval_loss"] or "nan"), np.float32)
    new, _ = engine.step(state, Signals(**signals), xp=np)
    if int(new.last.decision.action) & Action.ROLLBACK:  # a live run carries it out
        new = paid_for(new, int(new.budget.recoveries) - 1)
    return new, new.last.decision


def paid_for(state, recoveries):
    """The state with so many rollbacks left."""
    left = np.asarray(recoveries, np.int32)
    return state._replace(budget=state.budget._replace(recoveries=left))


def line_of(decision, action):
    """The content of a decision's line, without the scores."""
    scales = np.float32(decision.grad_scale), np.float32(decision.lr_scale)
    return Cause(int(decision.cause)), Action(action), bool(decision.skip), *scales


def by_hand(engine: Engine, state, rows, index):
    """(index, decision) of all rows that are not neutral, the states after each row."""
    found, states = [], []
    over = -1  # the incident at which a live run ends
    for number, row in zip(index, rows, strict=True):
        before, done = state, step(engine, state, row)
        if done is not None:
            state, decision = done
            action = int(decision.action)
            now, then = state.incident, before.incident
            fresh = int(now.number) != int(then.number) or int(then.recovered) != 0
            paid = bool(action & Action.ROLLBACK)
            if int(now.recovered) == 0 and fresh and (paid or int(now.number) != over):
                action |= int(Action.ROLLBACK)
                over = over if paid else int(now.number)
            line = line_of(decision, action)
            if line != (Cause(0), Action(0), False, 1.0, 1.0):
                found.append((number, line))
        states.append(state)
    return found, states


def replayed(trace, policy):
    result = replay(trace, policy)
    return [(row.index, line_of(row, row.action)) for row in result], result


def test_one_attempt(tmp_path):
    path = logs.write(tmp_path / "a.csv", logs.eventful(900))
    engine = load("pretraining").engine()
    wanted, _ = by_hand(engine, engine.init(), rows_of(path), range(900))
    got, result = replayed(logs.trace(path), "pretraining")
    assert got == wanted
    summary = result.summary
    assert summary.rows == 900
    assert summary.unjudged == sum(not row["loss"] + row["grad_norm"] for row in rows_of(path)) > 0


def test_counts_are_those_of_the_lines(tmp_path):
    run = logs.eventful(900)
    for onset in (300, 450, 600, 750):
        run["loss"][onset : onset + 12] = ["nan"] * 12
    got, result = replayed(logs.trace(logs.write(tmp_path / "a.csv", run)), "pretraining")
    summary, decisions = result.summary, [line for _, line in got]
    assert summary.skips == sum(line[2] for line in decisions)
    assert summary.clips == sum(line[3] < 1 for line in decisions)
    for cause in Cause:
        assert summary.causes.get(str(cause.name), 0) == sum(cause in line[0] for line in decisions)
    for action in Action:
        count = sum(action in line[1] for line in decisions)
        assert summary.actions.get(str(action.name), 0) == count
    assert summary.rollbacks == summary.actions["ROLLBACK"]
    assert summary.lowest_lr == pytest.approx(min(float(line[4]) for line in decisions))
    assert summary.incidents == len(result.incidents) > 2
    ends = [each.step for each in result.incidents if "STOP" in each.action]
    assert summary.stopped_step == ends[0]


def test_a_resumed_run_goes_back_with_its_budget(tmp_path):
    """Detectors as of the row before the resumed step; budget, incidents and LR of the live run."""
    run = logs.eventful(700)
    first = logs.write(tmp_path / "1.csv", logs.part(run, 0, 450))
    second = logs.write(tmp_path / "2.csv", logs.part(run, 300, 700), range(300, 700))
    engine = load("pretraining").engine()
    before, states = by_hand(engine, engine.init(), rows_of(first), range(450))
    state = engine.on_rollback(states[-1], states[299], xp=np)
    state = paid_for(state, states[-1].budget.recoveries)  # what it ordered has been paid for
    assert int(states[-1].budget.recoveries) < int(states[100].budget.recoveries)
    after, _ = by_hand(engine, state, rows_of(second), range(450, 850))
    got, result = replayed(logs.trace(first, second), "pretraining")
    assert got == before + after
    assert {each.attempt for each in result.incidents} == {0, 1}


def test_a_spent_budget_is_reported_and_the_replay_goes_on(tmp_path):
    run = logs.noisy(900)
    for onset in range(100, 900, 150):
        run["loss"][onset : onset + 20] = ["nan"] * 20
    first = logs.write(tmp_path / "1.csv", run)
    second = logs.write(tmp_path / "2.csv", logs.part(run, 680, 900), range(680, 900))
    _, result = replayed(logs.trace(first, second), "pretraining")
    summary = result.summary
    recoveries = load("pretraining").budget.recoveries
    assert summary.rollbacks - summary.spent == recoveries
    assert summary.spent >= 2
    again = [row for row in replay(result.trace, "pretraining") if row.spent]
    assert again[0].index < 680
    assert again[0].step == summary.stopped_step
    assert again[-1].attempt == 1
    assert all(Action.STOP | Action.ROLLBACK in row.action for row in again)
    assert "budget was exhausted" in outcome(result.incidents[recoveries])


def test_the_first_rollback_of_an_incident_is_what_would_have_happened(tmp_path):
    """The curve does not heal: `patience` alarms later the policy asks and cuts again."""
    run = logs.noisy(900)
    for onset in (200, 500):
        run["loss"][onset : onset + 8] = ["nan"] * 8
    policy = rules()
    _, result = replayed(logs.trace(logs.write(tmp_path / "a.csv", run)), policy)
    summary, budget = result.summary, policy.budget.recoveries
    orders = [row for row in replay(result.trace, policy) if Action.ROLLBACK in row.action]
    assert [row.index for row in orders] == [200, 206, 500, 506]
    assert [row.spent for row in orders] == [place >= budget for place in range(4)]
    assert budget == 3, "the last is denied, and is a repeat"
    assert (summary.incidents, summary.rollbacks, summary.repeats) == (2, 4, 2)
    assert (summary.spent, summary.stopped_step) == (1, None)
    assert (summary.repeat_cuts, summary.actions["CUT_LR"]) == (2, 4)
    assert summary.lowest_lr < summary.lowest_lr_first == orders[2].lr_scale
    first, second = result.incidents
    assert first.lr_path == (1.0, 0.5)
    assert "STOP" not in second.action
    assert "would roll back (once more if that had not helped)" in outcome(first)
    assert "would roll back (if that had not helped: it would stop)" in outcome(second)


def test_evaluations_are_signals_of_the_whole_run(tmp_path):
    """NaN where there was none; the detector goes on learning the training loss there."""
    policy = loads(OVERFIT)
    run = logs.noisy(300)
    run["eval_loss"] = [5.5 if row % 50 == 49 else "" for row in range(300)]
    path = logs.write(tmp_path / "a.csv", run)
    engine = policy.engine()
    wanted, _ = by_hand(engine, engine.init(), rows_of(path), range(300))
    got, result = replayed(logs.trace(path), policy)
    assert got == wanted
    assert result.summary.causes["OVERFIT"] > 100


def test_scores_belong_to_the_signals_of_the_row(tmp_path):
    path = logs.write(tmp_path / "a.csv", logs.eventful(700))
    rows = rows_of(path)
    seen = set()
    for row in replay(logs.trace(path), "pretraining"):
        logged = rows[row.index]
        assert set(row.z) == {name for name in ("loss", "grad_norm") if logged[name] != ""}
        assert (row.threshold is None) == (logged["grad_norm"] == "")
        assert all(math.isfinite(z) for z in row.z.values())
        seen.add(frozenset(row.z))
    assert len(seen) == 3


def test_observing_orders_the_same(tmp_path):
    """Observe mode reports what the same policy does in heal mode."""
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(440)))
    healing = load("pretraining", mode="heal", name="same")
    watching = load(healing, mode="observe")
    assert [*replay(trace, watching).lines()][:-1] == [*replay(trace, healing).lines()][:-1]


def test_adagc_without_norms_of_tensors(tmp_path):
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(440)))
    *lines, summary = replay(trace, loads(ADAGC)).lines()
    assert '"clips": 0' in summary
    assert '"group_norms": ["clip"]' in summary
    assert '"ROLLBACK"' in "".join(lines)
    assert "threshold" not in "".join(lines)
