"""The simulation of long runs, against what can be computed by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest

from benchmarks.goodput.__main__ import young
from benchmarks.goodput.simulation import DAY, Care, Cluster, Spent, simulate

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
    noticed=1.0,
    notice_s=30.0,
    rollback_s=10.0,
    person_s=5000.0,
    probation_s=400.0,
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
    assert spent.lost == spent.down == 0


@pytest.mark.parametrize("interval_s", [300.0, 900.0, 3600.0])
def test_crashes_cost_what_daly_has_computed(interval_s):
    """Daly 2006, eq. 13: exponential failures, which may also strike during a save or a start."""
    care = dataclasses.replace(CARE, interval_s=interval_s)
    mtbf, restart = FAILS.mtbf_s, FAILS.restart_s
    took = mtbf * math.exp(restart / mtbf) * math.expm1((interval_s + care.save_s) / mtbf)
    found, error = mean(FAILS, care, "useful")
    assert found == pytest.approx(interval_s / took, abs=4 * error)


def test_the_best_interval_is_youngs():
    best = young(FAILS, CARE)
    at = lambda factor: mean(  # noqa: E731
        FAILS, dataclasses.replace(CARE, interval_s=best * factor), "useful"
    )[0]
    assert at(1) > max(at(1 / 4), at(4))


def test_a_hang_costs_the_timeout_too():
    crash, _ = mean(FAILS, CARE, "down")
    hang, error = mean(dataclasses.replace(FAILS, hang_share=1.0), CARE, "down")
    assert hang / crash == pytest.approx(900 / 300, abs=0.1 + 4 * error)


def test_damage_costs_what_was_trained_since_the_newest_good_checkpoint():
    """The rollback comes 30 s later, to a checkpoint that was 400 s old, on average 450 s more."""
    per_damage = CARE.notice_s + CARE.probation_s + CARE.interval_s / 2
    found, error = mean(IS_DAMAGED, CARE, "lost", 10)
    # The two edges: a damage within the time of another one, and the rate per second of training.
    assert found == pytest.approx(4.0 * per_damage / DAY, rel=0.05, abs=4 * error)


def test_unnoticed_damage_waits_for_a_person():
    person = dataclasses.replace(CARE, noticed=0.0)
    found, error = mean(IS_DAMAGED, person, "lost", 24)
    damages = 1 / (1 / 4.0 + (5000 + 450) / DAY)  # none while one is there
    assert found == pytest.approx(damages * (5000 + 450) / DAY, rel=0.05, abs=4 * error)


def test_damage_is_in_the_checkpoints_that_follow_it():
    """A crash alone does not heal it: the newest checkpoint may be damaged."""
    both = dataclasses.replace(IS_DAMAGED, failures_per_rank_day=5e-3)
    never = dataclasses.replace(CARE, noticed=0.0, person_s=math.inf, interval_s=60.0)
    assert simulate(both, never, 10.0, 0).useful < 0.3


def test_false_alarms_cost_too():
    alarms = dataclasses.replace(CARE, false_per_step=1e-3)  # one in 5,000 s
    found, error = mean(NOTHING_HAPPENS, alarms, "lost", 10)
    share = (CARE.probation_s + CARE.interval_s / 2) / 5000
    assert found == pytest.approx(share / (1 + 30 / 900), rel=0.08, abs=4 * error)


@pytest.mark.parametrize("seed", range(3))
def test_the_shares_are_a_whole(seed):
    both = dataclasses.replace(IS_DAMAGED, failures_per_rank_day=5e-2, hang_share=0.3)
    spent = simulate(both, dataclasses.replace(CARE, false_per_step=1e-3, noticed=0.5), 20.0, seed)
    assert sum(spent) == pytest.approx(1)
    assert min(spent) > 0
    assert isinstance(spent, Spent)
