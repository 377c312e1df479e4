"""The loss probe: its verdicts on healthy and bad curves, and on the public runs."""

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.tools.probe.checks import LossInputs
from healcore.tools.probe.loss import Event, find_events
from healcore.tools.replay import replay
from tests.tools.probe.curves import falling, probe, probe_values, write
from tests.tools.probe.trained_networks import verdicts
from tests.tools.recorded_runs import FOLDER, needed
from tests.tools.replay import logs

ROWS = 100
LOSS = falling(ROWS, 0.02)
NORM = np.linspace(2, 1, ROWS)
COLLAPSED = np.where(np.arange(ROWS) < 40, LOSS, 0.0)
SPARSE = [loss for value in LOSS for loss in (value, *[""] * 9)]
NOISE = np.random.default_rng(20261120).normal(size=800)


def replaced(values: np.ndarray, where: slice | list[int], value: float) -> np.ndarray:
    values = values.copy()
    values[where] = value
    return values


def regret(end: float) -> np.ndarray:
    """A loss that falls to 2 and rises to `end`."""
    rise = np.linspace(2, end, 400)
    return np.concatenate([np.linspace(10, 2, 400), rise]) + 0.02 * NOISE


CASES = {
    "healthy and short": ("PASS", falling(40, 0.0), {}),
    "healthy and noisy": ("PASS", falling(3000, 0.3), {}),
    "a rising line": ("FAIL", np.linspace(2, 3, 10), {}),
    "all the same": ("WARN", np.full(ROWS, 0.5), {}),
    "policy gradients about 0": ("PASS", 0.02 * NOISE[:400], {}),
    "policy gradients below 0": ("PASS", np.linspace(-1, -3, 400) + 0.05 * NOISE[:400], {}),
    "a little progress lost again": ("PASS", regret(2.4), {}),
    "progress lost again": ("WARN", regret(3.5), {}),
    "most progress lost again": ("FAIL", regret(7.0), {}),
    "NaN norms at the end": ("FAIL", LOSS, {"grad_norm": replaced(NORM, slice(-5, None), np.nan)}),
    "NaN norms in the middle": ("WARN", LOSS, {"grad_norm": replaced(NORM, slice(30, 60), np.nan)}),
    "overflows of a loss scale": ("PASS", LOSS, {"grad_norm": replaced(NORM, [0, 1, 50], np.inf)}),
    "zero with NaN norms": ("FAIL", COLLAPSED, {"grad_norm": np.where(COLLAPSED, NORM, np.nan)}),
    "zero without norms": ("FAIL", COLLAPSED, {}),
    "zero from the start": ("FAIL", 0 * LOSS, {"grad_norm": np.nan * NORM}),
    "zero with gradients": ("PASS", COLLAPSED, {"grad_norm": NORM}),
    "zero by rounding": ("PASS", np.round(2.3 * np.exp(-np.arange(ROWS) / 6), 4), {}),
    "empty cells at the end": ("WARN", LOSS, {"loss": [*LOSS[:60], *[""] * 40]}),
    "empty cells beside norms": (
        "WARN",
        LOSS,
        {"loss": [*LOSS[:60], *[""] * 40], "grad_norm": NORM},
    ),
    "a loss at every tenth norm": (
        "PASS",
        LOSS,
        {"loss": SPARSE, "grad_norm": np.resize(NORM, 1000)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_curve_gets_its_verdict(tmp_path, name):
    verdict, loss, others = CASES[name]
    columns = {"loss": loss.tolist()} | {name: list(column) for name, column in others.items()}
    result = probe(logs.write(tmp_path / "run.csv", columns))
    assert result.verdict.value == verdict, result.checks
    if name == "policy gradients below 0":
        assert "convergence_ratio" not in verdicts(result)


def test_nan_that_was_survived_warns_and_names_the_steps(tmp_path):
    values = replaced(falling(200, 0.05), slice(60, 63), np.nan)
    result = probe_values(tmp_path, values)
    assert result.verdict.value == "WARN"
    assert "3 of 200 values are NaN or Inf, first at step 60" in result.checks[0].message
    assert probe_values(tmp_path, values, max_nonfinite=3).verdict.value == "PASS"


def test_smoothness_follows_its_definition(tmp_path):
    values = falling(300, 0.2)
    recorded = values.astype(np.float32).astype(np.float64)
    result = probe_values(tmp_path, values)
    check = next(check for check in result.checks if check.name == "smoothness")
    assert check.value == pytest.approx(1 - np.diff(recorded).var() / recorded.var(), rel=1e-9)


def test_the_bounds_can_be_set(tmp_path):
    path = write(tmp_path, falling(300, 0.02))
    assert verdicts(probe(path, max_final_loss=1.5))["final_loss"] == "FAIL"
    assert verdicts(probe(path, max_final_loss=3.0))["final_loss"] == "PASS"
    assert verdicts(probe(path, max_convergence_ratio=0.1))["convergence_ratio"] == "WARN"
    assert verdicts(probe(path, min_smoothness=0.9999))["smoothness"] == "WARN"


def test_steps_trained_again_count_once(tmp_path):
    """A run that diverged, rolled back and recovered passes."""
    good = falling(300, 0.02)
    steps = np.concatenate([np.arange(210), np.arange(150, 300)])
    values = np.concatenate([good[:150], np.full(60, 50.0), good[150:]])
    result = probe(write(tmp_path, values, steps=steps))
    assert result.verdict.value == "PASS", result.checks
    assert (result.facts["values"], result.facts["files"]) == (300, 1)
    assert 20 > result.facts["start"] > result.facts["end"] > 0
    assert result.facts["initial_loss"] == np.float32(good[0])
    assert any("60 rows" in note for note in result.notes)


def test_the_thinned_curve_keeps_the_extremes(tmp_path):
    values = falling(20_000, 0.05)
    values[7_777], values[13_131], values[15_000] = 99.0, -5.0, np.nan
    curve = probe_values(tmp_path, values).facts["curve"]
    assert len(curve["value"]) == len(curve["step"]) <= 512
    kept = dict(zip(curve["step"], curve["value"], strict=True))
    for step in 0, 7_777, 13_131, 15_000, 19_999:
        assert np.array_equal(kept[step], np.float32(values[step]), equal_nan=True)


def test_the_score_is_the_weighted_share_of_passed_checks(tmp_path):
    """A warning counts half of its weight."""
    values = falling(300, 0.05)
    assert probe_values(tmp_path, values).score == 1.0
    assert probe_values(tmp_path, np.append(values, np.nan)).score == 0.0
    assert probe_values(tmp_path, values[:5]).score is None
    checks = [check.name for check in probe_values(tmp_path, values).checks]
    for weights, expected in (
        ({}, 6.5 / 7),
        ({"smoothness": 2.0}, 7 / 8),
        (dict.fromkeys(checks, 0.0) | {"smoothness": 1.0}, 0.5),
    ):
        result = probe_values(tmp_path, values, min_smoothness=0.9999, weights=weights)
        assert result.score == expected


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=120))
def test_any_curve_has_an_answer(tmp_path_factory, values):
    verdict = probe_values(tmp_path_factory.mktemp("curve"), values).verdict.value
    finite = np.isfinite(values)
    if not finite[-1]:
        assert verdict == "FAIL"
    elif not finite.all():
        assert verdict in ("WARN", "FAIL")
    elif len(values) < 10:
        assert verdict == "SKIP"


NOISES = {
    "gauss": lambda r, n: r.normal(size=n),
    "heavy tails": lambda r, n: r.standard_t(3, size=n),
    "skewed": lambda r, n: np.exp(0.8 * r.normal(size=n)),
    "one in ten": lambda r, n: np.where(r.random(n) < 0.1, 4.0, 0.0) + 0.5 * r.normal(size=n),
    "two kinds of batches": lambda r, n: np.where(r.random(n) < 0.05, 4.0, 0.0) + r.normal(size=n),
}


def events(values: np.ndarray, sigmas: float = 5.5) -> list[Event]:
    return find_events(np.arange(len(values)), values, LossInputs(event_sigmas=sigmas))


def base(steps: int, noise: str = "gauss", size: float = 0.02) -> np.ndarray:
    random = np.random.default_rng(2)
    return 1 + 9 * (1 + np.arange(steps) / 5) ** -0.4 + size * NOISES[noise](random, steps)


def test_noise_is_no_event():
    assert [name for name in NOISES if events(base(5000, name, 0.1))] == []


@pytest.mark.parametrize(
    ("noise", "length"), [("gauss", 3), ("heavy tails", 5), ("skewed", 20), ("gauss", 60)]
)
def test_a_spike_that_lasts_is_one(noise, length):
    values = base(2000, noise)
    values[1200 : 1200 + length] += 3.0
    (event,) = events(values)
    assert event.step == 1200
    assert length - 2 <= event.values <= length + 2
    assert event.last == event.step + event.values - 1
    assert events(values, sigmas=5000.0) == []


@pytest.mark.parametrize("rows", [2000, 40_001])
def test_each_event_begins_where_a_replay_has_its_alarm(tmp_path, rows):
    """Also if a value shortly before it is high, and in a curve that is reduced to medians."""
    values = 1 + 0.03 * np.random.default_rng(4).normal(size=rows)
    onsets = [rows // 2 + 7, rows // 2 + 507]
    for onset in onsets:
        values[onset : onset + 30 * (rows // 2000)] += 2.5
        values[onset - 5] = 1.11
    path = write(tmp_path, values)
    result = probe(path)
    assert [event.step for event in result.facts["events"]] == onsets
    assert list(replay(logs.trace(path), "default").summary.onsets) == onsets
    (check,) = [each for each in result.checks if each.name == "instability_events"]
    assert re.search(rf"step {onsets[0]} for \d+ values, step {onsets[1]} for", check.message)


def test_one_high_value_is_no_event_and_high_values_again_and_again_are_one(tmp_path):
    values = base(1000)
    values[[300, 500, 700]] += 3.0
    assert events(values) == []
    values[[502, 506, 508]] += 3.0
    assert [(event.step, event.last) for event in events(values)] == [(500, 508)]
    assert verdicts(probe_values(tmp_path, values))["instability_events"] == "WARN"


def test_the_values_that_the_detector_learns_are_named(tmp_path):
    """An event there raises no alarm, so a note says that nobody has looked for it."""
    values = base(300)
    values[20:28] += 6.0
    result = probe_values(tmp_path, values)
    assert verdicts(result)["instability_events"] == "PASS"
    assert "within the first 36 values is not found" in result.notes[-1]


@pytest.mark.slow
@needed
@pytest.mark.parametrize(
    ("pattern", "number", "verdict"),
    [
        ("algoperf/calm/*.csv", 47, "PASS"),
        ("algoperf/hard_negative_vit/*.csv", 16, "PASS"),
        ("modded_nanogpt/*/*.csv", 14, "PASS"),
        ("megatron_golden/*.csv", 12, "PASS"),
        ("mlperf_v5.1/flux1*.csv", 6, "PASS"),
        ("mlperf_v5.1/llama31_405b*.csv", 2, "PASS"),
        ("algoperf/early_nan_100/*.csv", 12, "FAIL"),
        ("mlperf_v5.1/llama31_8b*.csv", 10, "WARN"),
    ],
)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.stress)])
def test_verdicts_of_recorded_runs(every, pattern, number, verdict):
    paths = sorted(FOLDER.glob(pattern))[::every]
    found = Counter(probe(path).verdict.value for path in paths)
    assert found == {verdict: math.ceil(number / every)}
