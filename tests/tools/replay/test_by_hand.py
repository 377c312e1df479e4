"""A replay decides as the engine driven row by row without its code, and as a live run."""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable
from enum import Flag
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.policy import load
from healcore.tools.replay import replay
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, train
from tests.tools.replay import logs

NEUTRAL = (Cause(0), Action(0), False, 1.0, 1.0)


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
    new, _ = engine.step(state, Signals(**signals))
    return paid_for(new, state.budget.recoveries), new.last.decision


def paid_for(state, recoveries):
    left = np.asarray(recoveries, np.int32)
    return state._replace(budget=state.budget._replace(recoveries=left))


def line_of(decision, action):
    """The content of a decision's line, without the scores."""
    scales = np.float32(decision.grad_scale), np.float32(decision.lr_scale)
    return Cause(int(decision.cause)), Action(action), bool(decision.skip), *scales


def by_hand(engine: Engine, state, rows, index):
    """(index, decision) of all rows that are not neutral, the states after each row."""
    found, states = [], []
    for number, row in zip(index, rows, strict=True):
        done = step(engine, state, row)
        if done is not None:
            state, decision = done
            line = line_of(decision, int(decision.action))
            if line != NEUTRAL:
                found.append((number, line))
        states.append(state)
    return found, states


def replayed(trace, policy):
    result = replay(trace, policy)
    return [(row.index, line_of(row, row.action)) for row in result], result


def flag_counts(values: Iterable[Flag]) -> dict[str, int]:
    """How often each flag is set in the values, by its name."""
    counts: Counter[str] = Counter()
    for value in values:
        counts.update(str(flag.name) for flag in value)
    return dict(counts)


@pytest.mark.slow
def test_a_replay_equals_the_engine_stepped_by_hand(tmp_path):
    """The decisions, the counts of them, and the scores of each row."""
    run = logs.eventful(900)
    for onset in (300, 450, 600, 750):
        run["loss"][onset : onset + 12] = ["nan"] * 12
    path = logs.write(tmp_path / "a.csv", run)
    rows = rows_of(path)
    engine = load("pretraining").engine()
    wanted, _ = by_hand(engine, engine.init(), rows, range(900))
    got: list[Any]
    got, result = replayed(logs.trace(path), "pretraining")
    assert got == wanted

    # The summary counts these decisions.
    summary = result.summary
    decisions = [line for _, line in got]
    assert summary.rows == 900
    assert summary.unjudged == sum(not row["loss"] + row["grad_norm"] for row in rows) > 0
    assert summary.skips == sum(line[2] for line in decisions)
    assert summary.clips == sum(line[3] < 1 for line in decisions)
    assert summary.causes == flag_counts(line[0] for line in decisions)
    assert summary.actions == flag_counts(line[1] for line in decisions)
    assert summary.rollbacks == sum("ROLLBACK" in each.action for each in result.incidents) > 1
    assert summary.lowest_lr == pytest.approx(min(float(line[4]) for line in decisions))
    assert summary.incidents == len(result.incidents) > 2

    # Each row has scores of the signals that it logged.
    for row in result:
        logged = {name for name in ("loss", "grad_norm") if rows[row.index][name] != ""}
        assert set(row.z) == logged
        assert (row.threshold is None) == ("grad_norm" not in logged)
        assert all(math.isfinite(z) for z in row.z.values())


@pytest.mark.slow
def test_a_resumed_run_goes_back_with_its_budget(tmp_path):
    """Detectors as of the row before the resumed step; budget, incidents and LR of the live run."""
    run = logs.eventful(700)
    first = logs.write(tmp_path / "1.csv", logs.part(run, 0, 450))
    second = logs.write(tmp_path / "2.csv", logs.part(run, 300, 700), range(300, 700))
    engine = load("pretraining").engine()
    before, states = by_hand(engine, engine.init(), rows_of(first), range(450))
    state = engine.on_rollback(states[-1], states[299])
    state = paid_for(state, states[-1].budget.recoveries)
    after, _ = by_hand(engine, state, rows_of(second), range(450, 850))
    got, _ = replayed(logs.trace(first, second), "pretraining")
    assert got == before + after


def test_rollbacks_use_up_no_budget_and_count_once_for_each_incident(tmp_path):
    """The curve does not heal: `patience` alarms later the policy orders and cuts again."""
    run = logs.noisy(900)
    for onset in (200, 500):
        run["loss"][onset : onset + 8] = ["nan"] * 8
    policy = rules()
    _, result = replayed(logs.trace(logs.write(tmp_path / "a.csv", run)), policy)
    summary = result.summary
    orders = [row for row in replay(result.trace, policy) if Action.ROLLBACK in row.action]
    assert [row.index for row in orders] == [200, 206, 500, 506]
    assert (summary.first_alarm, summary.incidents) == (result.trace.rows.step[200], 2)
    assert (summary.rollbacks, summary.actions["ROLLBACK"], summary.actions["CUT_LR"]) == (2, 4, 4)
    assert summary.lowest_lr == orders[3].lr_scale
    assert summary.stopped_step is None
    assert result.incidents[0].lr_path == (1.0, 0.25)


def test_evaluations_are_signals_of_the_whole_run(tmp_path):
    """NaN where there was none; the detector goes on learning the training loss there."""
    change = {"overfit": {"max_gap": 0.5}}
    policy = load("autoclip", clip={"window": 50}, detect=change)
    run = logs.noisy(300)
    run["eval_loss"] = [5.5 if row % 50 == 49 else "" for row in range(300)]
    path = logs.write(tmp_path / "a.csv", run)
    engine = policy.engine()
    wanted, _ = by_hand(engine, engine.init(), rows_of(path), range(300))
    got, result = replayed(logs.trace(path), policy)
    assert got == wanted
    assert result.summary.causes["OVERFIT"] > 100


def test_adagc_without_norms_of_tensors_clips_nothing_and_says_so(tmp_path):
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(440)))
    rule = {"to": ["loss_spike"], "when": {"sustained": True}, "do": ["rollback", "cut_lr"]}
    policy = load("adagc", detect={"loss_spike": {}}, respond=[rule])
    *lines, summary = replay(trace, policy).lines()
    assert '"clips": 0' in summary
    assert '"group_norms": ["clip"]' in summary
    assert '"ROLLBACK"' in "".join(lines)
    assert "threshold" not in "".join(lines)


def flags_of(kind: type[Flag], names: Iterable[str]) -> Flag:
    """The flags with these names. Names of other kinds are left out."""
    found = kind(0)
    for flag in kind:
        if str(flag.name) in names:
            found |= flag
    return found


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("bad", [[23], [2], [9, 30]], ids=["late", "before a save", "twice"])
def test_a_replay_has_the_decisions_of_a_live_run_with_rollbacks(framework, bad, tmp_path):
    """With rollbacks to a checkpoint and to the beginning."""
    path = tmp_path / "run.metrics.jsonl"
    loop = loop_of(framework, Faults(once=bad), rules())
    result = train(loop, rules(), range(40), metrics=path)
    assert result.rollbacks == len(bad)
    live = []
    for line in map(json.loads, path.open()):
        scales = np.float32(line["grad_scale"]), np.float32(line["lr_scale"])
        causes = flags_of(Cause, line["cause"])
        live.append((causes, flags_of(Action, line["action"]), line["skip"], *scales))
    decided, replayed_run = replayed(logs.trace(path), rules())
    found: list[Any] = [NEUTRAL] * len(live)
    for index, decision in decided:
        found[index] = decision
    assert found == live
    assert replayed_run.summary.rollbacks == len(bad)
    orders = [row for row in replayed_run if row.action & Action.ROLLBACK]
    assert [row.attempt for row in orders] == list(range(len(bad)))
