"""The simulation of long runs against closed forms, and its parameters against the raw records."""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from benchmarks.goodput import __main__ as goodput
from benchmarks.goodput import parameters
from benchmarks.goodput.simulation import DAY, Care, Cluster, simulate
from benchmarks.healbench.running import suite

RESULTS = Path(goodput.RESULTS)
NOTHING_HAPPENS = Cluster(
    ranks=1000, failures_per_rank_day=0.0, hang_share=0.0, damages_per_day=0.0, step_s=5.0,
    restart_s=300.0,
)  # fmt: skip
CARE = Care(
    name="policy", interval_s=900.0, save_s=20.0, hang_timeout_s=600.0, restore_s=10.0,
    person_s=5000.0, rolled_back=1.0, rollbacks=((30.0, 800.0),),
)  # fmt: skip
FAILS = dataclasses.replace(NOTHING_HAPPENS, failures_per_rank_day=5e-3)
IS_DAMAGED = dataclasses.replace(NOTHING_HAPPENS, damages_per_day=4.0)


def mean(cluster: Cluster, care: Care, name: str, seeds: int = 6) -> tuple[float, float]:
    """A share and its standard error."""
    shares = [getattr(simulate(cluster, care, 30.0, seed), name) for seed in range(seeds)]
    return statistics.fmean(shares), statistics.stdev(shares) / math.sqrt(seeds)


@pytest.mark.parametrize("interval_s", [300.0, 3600.0])
def test_crashes_cost_what_daly_has_computed(interval_s):
    """Daly 2006, eq. 13: exponential failures, which may also strike during a save or a start."""
    care = dataclasses.replace(CARE, interval_s=interval_s)
    mtbf, restart = FAILS.mtbf_s, FAILS.restart_s
    took = mtbf * math.exp(restart / mtbf) * math.expm1((interval_s + care.save_s) / mtbf)
    found, error = mean(FAILS, care, "useful")
    assert found == pytest.approx(interval_s / took, abs=4 * error)


def test_a_damage_that_is_rolled_back_costs_the_undone_steps():
    found, error = mean(IS_DAMAGED, CARE, "lost", 10)
    # The two edges: a damage within the time of another one, and the rate per second of training.
    assert found == pytest.approx(4.0 * 800 / DAY, rel=0.05, abs=4 * error)


@pytest.mark.slow
def test_needless_rollbacks_cost_what_renewal_theory_says():
    """`useful` steps of a cycle 1 / rate - undone, in a time of 1 / rate + restore."""
    alarms = dataclasses.replace(
        CARE, save_s=0.0, needless_per_step=1e-3, needless_s=400.0, evidence_s=50.0
    )
    found, error = mean(NOTHING_HAPPENS, alarms, "useful", 100)
    rate = 1e-3 / NOTHING_HAPPENS.step_s
    assert found == pytest.approx((1 - rate * 400) / (1 + rate * 60), rel=1e-3, abs=4 * error)


@pytest.mark.parametrize("policy", parameters.POLICIES)
def test_the_parameters_are_those_of_the_raw_records(policy):
    """Rollbacks counted a second time, from the lines of the file."""
    committed = json.loads((RESULTS / "goodput.json").read_text())["parameters"]
    (given,) = [parameters.Measured(**each) for each in committed if each["policy"] == policy]
    found = parameters.measure(policy)
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(given))
    arm, calm = parameters.POLICIES[policy]
    kinds = {(f, t.name): t for f in ("torch", "jax") for t in suite(f).tasks.values()}
    steps = needless = 0
    for row in map(json.loads, (RESULTS / "healbench.jsonl").read_text().splitlines()):
        is_run = row["arm"] == arm and row.get("status", "done") == "done"
        if not is_run or (row["framework"], row["task"]) not in kinds:
            continue
        task = kinds[row["framework"], row["task"]]
        if task.kind == "healthy" and (not calm or task.family in calm):
            steps, needless = steps + row["steps"], needless + row.get("rollbacks", 0)
    assert (found.healthy_steps, found.needless) == (steps, needless)
