"""The simulation of long runs against closed forms, and its parameters against the raw records."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from benchmarks.goodput import __main__ as goodput
from benchmarks.goodput import parameters
from benchmarks.goodput.simulation import DAY, Care, Cluster, simulate

RESULTS = Path(goodput.RESULTS)
NOTHING_HAPPENS = Cluster(
    ranks=1000,
    failures_per_rank_day=0.0,
    hang_share=0.0,
    damages_per_day=0.0,
    step_s=5.0,
    restart_s=300.0,
)
CARE = Care(
    name="policy",
    interval_s=900.0,
    save_s=20.0,
    hang_timeout_s=600.0,
    restore_s=10.0,
    person_s=5000.0,
    rolled_back=1.0,
    rollbacks=((30.0, 800.0),),
)
FAILS = dataclasses.replace(NOTHING_HAPPENS, failures_per_rank_day=5e-3)
IS_DAMAGED = dataclasses.replace(NOTHING_HAPPENS, damages_per_day=4.0)


def mean(cluster: Cluster, care: Care, name: str, seeds: int = 6) -> tuple[float, float]:
    """A share and its standard error."""
    shares = [getattr(simulate(cluster, care, 30.0, seed), name) for seed in range(seeds)]
    return statistics.fmean(shares), statistics.stdev(shares) / math.sqrt(seeds)


def test_without_failures_only_saving_takes_time():
    spent = simulate(NOTHING_HAPPENS, CARE, 10.0, 0)
    assert spent.useful == pytest.approx(900 / 920, rel=1e-3)
    assert spent.saving == pytest.approx(20 / 920, rel=1e-3)
    assert spent.lost == spent.down == spent.evidence == 0


@pytest.mark.parametrize("interval_s", [300.0, 900.0, 3600.0])
def test_crashes_cost_what_daly_has_computed(interval_s):
    """Daly 2006, eq. 13: exponential failures, which may also strike during a save or a start."""
    care = dataclasses.replace(CARE, interval_s=interval_s)
    mtbf, restart = FAILS.mtbf_s, FAILS.restart_s
    took = mtbf * math.exp(restart / mtbf) * math.expm1((interval_s + care.save_s) / mtbf)
    found, error = mean(FAILS, care, "useful")
    assert found == pytest.approx(interval_s / took, abs=4 * error)


@pytest.mark.parametrize("damages_per_day", [0.0, 8.0])
def test_the_best_interval_loses_least(damages_per_day):
    cluster = dataclasses.replace(FAILS, damages_per_day=damages_per_day)
    person = dataclasses.replace(CARE, rolled_back=0.0, person_s=0.0)
    best = goodput.best_interval(cluster, CARE.save_s)
    at = lambda factor: mean(  # noqa: E731
        cluster, dataclasses.replace(person, interval_s=best * factor), "useful"
    )[0]
    assert at(1) > max(at(1 / 4), at(4))


def test_a_damage_that_is_rolled_back_costs_the_undone_steps():
    found, error = mean(IS_DAMAGED, CARE, "lost", 10)
    # The two edges: a damage within the time of another one, and the rate per second of training.
    assert found == pytest.approx(4.0 * 800 / DAY, rel=0.05, abs=4 * error)


def test_a_missed_damage_waits_for_a_person():
    person = dataclasses.replace(CARE, rolled_back=0.0)
    found, error = mean(IS_DAMAGED, person, "lost", 24)
    damages = 1 / (1 / 4.0 + (5000 + 450) / DAY)  # none while one is there
    assert found == pytest.approx(damages * (5000 + 450) / DAY, rel=0.05, abs=4 * error)


def test_a_restart_before_the_rollback_loses_the_evidence():
    """Then a person repairs the damage: as under no policy."""
    cluster = dataclasses.replace(IS_DAMAGED, failures_per_rank_day=0.1)  # every 864 s
    slow = dataclasses.replace(
        CARE, interval_s=60.0, rollbacks=((4000.0, 4100.0),), person_s=20_000.0
    )
    person = dataclasses.replace(slow, rolled_back=0.0)
    found, error = mean(cluster, slow, "useful")
    assert found == pytest.approx(mean(cluster, person, "useful")[0], abs=4 * error)


def test_damage_is_in_the_checkpoints_that_follow_it():
    """A crash alone does not heal it: the newest checkpoint may be damaged."""
    both = dataclasses.replace(IS_DAMAGED, failures_per_rank_day=5e-3)
    never = dataclasses.replace(CARE, rolled_back=0.0, person_s=math.inf, interval_s=60.0)
    assert simulate(both, never, 10.0, 0).useful < 0.3


@pytest.mark.parametrize("per_step", [1e-4, 1e-3])
def test_needless_rollbacks_cost_what_renewal_theory_says(per_step):
    """`useful` steps of a cycle 1 / rate - undone, in a time of 1 / rate + restore."""
    alarms = dataclasses.replace(
        CARE, save_s=0.0, needless_per_step=per_step, needless_s=400.0, evidence_s=50.0
    )
    found, error = mean(NOTHING_HAPPENS, alarms, "useful", 100)
    rate = per_step / NOTHING_HAPPENS.step_s
    assert found == pytest.approx((1 - rate * 400) / (1 + rate * 60), rel=1e-3, abs=4 * error)


# -- parameters ------------------------------------------------------------------------------------


def _lines(arm: str) -> dict[tuple[str, str, int], dict]:
    """The records of an arm."""
    rows = map(json.loads, (RESULTS / "healbench.jsonl").read_text().splitlines())
    done = (row for row in rows if row["arm"] == arm and row.get("status", "done") == "done")
    return {(row["framework"], row["task"], row["seed"]): row for row in done}


def _value(row: dict) -> float:
    return float(row.get("metric", row.get("metric_text", "nan")))


@pytest.fixture(scope="module")
def committed():
    result = json.loads((RESULTS / "goodput.json").read_text())
    return {each["policy"]: parameters.Measured(**each) for each in result["parameters"]}


@pytest.mark.parametrize("policy", parameters.POLICIES)
def test_the_parameters_are_those_of_the_raw_records(policy, committed):
    """Counted a second time, from the lines of the files."""
    from benchmarks.healbench.running import suite

    arm, calm = parameters.POLICIES[policy]
    kinds = {(f, t.name): t for f in ("torch", "jax") for t in suite(f).tasks.values()}
    runs = {key: row for key, row in _lines(arm).items() if key[:2] in kinds}
    off = _lines("nothing")
    damaged = rolled = steps = needless = undone = backs = 0
    for (framework, name, seed), row in runs.items():
        task, back = kinds[framework, name], row.get("rollbacks", 0)
        if task.kind == "healthy":
            undone += row["steps"] - off[framework, name, seed]["steps"] if back else 0
            backs += back
            if not calm or task.family in calm:
                steps, needless = steps + row["steps"], needless + back
        elif task.family == "damage":
            plain, undamaged = off[framework, name, seed], off[framework, task.reference, seed]
            ratio = _value(plain) / _value(undamaged)
            if math.isnan(ratio) or ratio > 1.02:
                damaged, rolled = damaged + 1, rolled + (back > 0)
    found = parameters.measure(policy)
    assert json.loads(json.dumps(found._asdict())) == json.loads(
        json.dumps(committed[policy]._asdict())
    )
    assert (found.damaged_runs, found.rolled_back_runs) == (damaged, rolled)
    assert (found.healthy_steps, found.needless) == (steps, needless)
    assert found.needless_steps == pytest.approx(undone / backs if backs else 0)


def test_the_simulation_uses_the_parameters(committed):
    options = argparse.Namespace(
        step_s=6.0, pass_share=0.5, gigabytes_per_rank=4.0, hang_timeout_s=600.0, person_s=1.0
    )
    measured = next(iter(committed.values()))
    care = goodput._policy(measured, options)
    assert care.rolled_back == measured.rolled_back_runs / measured.damaged_runs
    assert care.needless_per_step == measured.needless / measured.healthy_steps
    assert care.evidence_share == pytest.approx(measured.passes_per_step * 3.0 / 6.0)
    assert care.rollbacks[0] == tuple(6.0 * each for each in measured.rollbacks[0])
