"""The published rules on small cases made by hand, and against the scorer next to the traces."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks import labelled_runs, published_rules

SHARED = Path(__file__).resolve().parents[3] / "shared"
SCORER = SHARED / "tools" / "score_detectors.py"


RULES = [*published_rules.ON_LOSS.values(), *published_rules.ON_NORM.values()]


def where(alarms: list[bool]) -> list[int]:
    return [row for row, alarm in enumerate(alarms) if alarm]


def alternating(count: int) -> list[float]:
    """1, 3, 1, 3, ...: mean 2, standard deviation 1 (a little more, with count - 1)."""
    return [1.0, 3.0] * (count // 2)


def test_olmo_waits_for_64_losses_and_then_for_six_sigmas():
    sigma = float(np.std(alternating(64), ddof=1))
    assert where(published_rules.olmo_skip_step([*alternating(62), 100.0])) == []
    assert where(published_rules.olmo_skip_step([*alternating(64), 2 + 5.9 * sigma])) == []
    assert where(published_rules.olmo_skip_step([*alternating(64), 2 + 6.1 * sigma])) == [64]


def test_olmo_forgets_what_is_128_losses_ago():
    early = [50.0, *alternating(126)]
    assert where(published_rules.olmo_skip_step([*early, 20.0])) == []
    assert where(published_rules.olmo_skip_step([*early, *alternating(2), 20.0])) == [129]


def test_the_spike_score_wants_seven_sigmas_and_128_values():
    sigma = float(np.std(alternating(128), ddof=1))
    assert where(published_rules.olmo_spike_score([*alternating(126), 100.0])) == []
    assert where(published_rules.olmo_spike_score([*alternating(128), 2 + 6.9 * sigma])) == []
    assert where(published_rules.olmo_spike_score([*alternating(128), 2 + 7.1 * sigma])) == [128]


def test_lightning_wants_twice_the_mean_of_ten_away_from_it():
    assert where(published_rules.lightning([1.0] * 9 + [9.0])) == []
    assert where(published_rules.lightning([1.0] * 10 + [2.9])) == []
    assert where(published_rules.lightning([1.0] * 10 + [3.0])) == [10]


def test_five_medians_is_strict():
    assert where(published_rules.five_medians([1.0] * 20 + [5.0])) == []
    assert where(published_rules.five_medians([1.0] * 20 + [5.1])) == [20]
    assert where(published_rules.five_medians([1.0] * 19 + [5.1])) == []


def test_megatron_compares_with_the_largest_of_the_first_hundred():
    assert where(published_rules.megatron([1.0] * 99 + [2.0, 19.0, 20.0])) == [101]
    assert where(published_rules.megatron([1.0] * 50 + [90.0])) == []


def test_kill_loss_spike_wants_five_outliers_in_a_row():
    four = [1.0] * 100 + [10.0] * 4
    assert where(published_rules.kill_loss_spike([*four, 1.0, 10.0])) == []
    assert where(published_rules.kill_loss_spike([*four, 10.0, 10.0])) == [104, 105]


def test_kill_loss_spike_wants_a_full_window():
    assert where(published_rules.kill_loss_spike([1.0] * 90 + [10.0] * 6)) == []


def test_kill_loss_spike_watches_high_losses_from_step_200_on():
    high = where(published_rules.kill_loss_spike([11.0] * 210))
    assert high == list(range(200, 210))
    assert where(published_rules.kill_loss_spike([9.0] * 210)) == []


def test_zclip_wants_two_and_a_half_deviations_after_its_warm_up():
    warm = [1.0, 3.0] * 12 + [2.0]
    sigma = float(np.std(warm))
    assert where(published_rules.zclip_z([*warm[:24], 100.0])) == []
    assert where(published_rules.zclip_z([*warm, 2 + 2.4 * sigma])) == []
    assert where(published_rules.zclip_z([*warm, 2 + 2.6 * sigma])) == [25]


@pytest.mark.parametrize(
    "rule", [*published_rules.ON_LOSS.values(), *published_rules.ON_NORM.values()]
)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_alarm_and_teaches_nothing(rule, wrong):
    values = np.random.default_rng(0).normal(5, 1, 300).tolist()
    values[250] = 100.0
    faulty = [*values[:150], wrong, *values[150:]]
    got = rule(faulty)
    assert got[150]
    if rule is not published_rules.megatron and rule is not published_rules.kill_loss_spike:
        assert got[:150] + got[151:] == rule(values)


@pytest.fixture(scope="module")
def scorer() -> ModuleType:
    """The published scorer, as a module."""
    if not SCORER.is_file():
        pytest.skip(f"no published scorer: {SCORER} is not there")
    pytest.importorskip("pandas")
    spec = importlib.util.spec_from_file_location("score_detectors", SCORER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scores_are_those_of_the_published_scorer(scorer):
    runs = labelled_runs.load(SHARED / "traces")
    alarms = {run.file: np.array(published_rules.lightning(run.loss.tolist())) for run in runs}
    rng = np.random.default_rng(1)
    for run in runs:  # alarms at random too, for every branch of the scoring
        alarms[run.file] |= rng.random(len(run.loss)) < 0.01
    expected = scorer.score(
        str(SHARED / "traces"), lambda file, loss, norm: np.flatnonzero(alarms[file])
    )
    got = labelled_runs.score(runs, alarms)
    for family, each in expected.items():
        mine = got[family.replace("llama8b", "llama_8b")]
        assert (mine.files, mine.rows) == (each["files"], each["points"])
        assert (mine.events, mine.found) == (each["events"], each["hit"])
        assert (mine.within_10, mine.latencies) == (each["hit10"], each["lat"])
        assert (mine.false, mine.false_files) == (each["false"], each["false_files"])


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("olmo_skip", published_rules.olmo_skip_step),
        ("olmo_score", published_rules.olmo_spike_score),
        ("five_median", published_rules.five_medians),
        ("megatron", published_rules.megatron),
        ("lightning", published_rules.lightning),
    ],
)
def test_the_rules_are_those_of_the_published_scorer(scorer, name, rule):
    rng = np.random.default_rng(2)
    for spread in (0.1, 1.0):
        losses = 2 + spread * rng.standard_t(3, 600)
        losses[[150, 400]] = 30.0
        losses[300:310] += 12
        losses[500] = math.nan
        assert where(rule(losses.tolist())) == scorer.RULES[name](losses)
