"""Chooses the middle of a plateau, not the luckiest setting, and only what holds elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.tools.sweep.choice import Splits, choose, choose_policy, family_of, split
from healcore.tools.sweep.scores import OrderCounts

RNG = np.random.default_rng(0)
UNITS = RNG.random((1500, 2))
UNITS[0] = (0.1, 0.1)


def plateau(centre: tuple[float, float], radius: float) -> np.ndarray:
    return ((UNITS - np.array(centre)) ** 2).sum(axis=1) < radius**2


def test_a_lucky_peak_is_not_taken():
    scores = np.where(plateau((0.6, 0.4), 0.2), 0.9, 0.2) + 0.01 * RNG.random(1500)
    lucky = int(np.argmin(((UNITS - 0.95) ** 2).sum(axis=1)))
    scores[lucky] = 1.0
    choice = choose(UNITS, scores)
    assert choice.best == lucky
    assert np.abs(UNITS[choice.index] - (0.6, 0.4)).max() < 0.08, "the middle"
    assert not choice.plateau[lucky]


def test_a_number_without_effect_stays_in_the_middle():
    scores = np.where(np.abs(UNITS[:, 0] - 0.3) < 0.1, 1.0, 0.0)
    choice = choose(UNITS, scores)
    assert abs(UNITS[choice.index, 0] - 0.3) < 0.05
    assert abs(UNITS[choice.index, 1] - 0.5) < 0.15


def test_families():
    assert family_of("runs/a_seed3.csv") == family_of("runs/a_seed12.csv")
    assert family_of("runs/llama/r1.csv") != family_of("runs/gpt/r1.csv")
    names = [f"runs/{recipe}/seed_{seed}.csv" for recipe in "abcdefgh" for seed in range(5)]
    families = [family_of(name) for name in names]
    events = [name[5] in "abcd" for name in names]
    splits = split(names, events, 0.3, seed=0)
    assert (splits.by, splits.families) == ("family", 8)
    for held in splits.held:
        inside = {f for f, out in zip(families, held, strict=True) if out}
        assert not inside & {f for f, out in zip(families, held, strict=True) if not out}
        sides = [{e for e, out in zip(events, held, strict=True) if out == side} for side in (0, 1)]
        assert sides == [{True, False}, {True, False}], "both sides have events and healthy runs"


def test_one_family_is_split_by_run_and_one_run_not_at_all():
    runs = [f"seed_{i}.csv" for i in range(6)]
    assert split(runs, [True] * 3 + [False] * 3, 0.3, 0).by == "run"
    assert split(["a"], [True], 0.3, 0) == Splits((), "", 1)
    assert split(["a", "b"], [True, True], 0.0, 0).held == ()


def test_the_one_family_with_events_is_held_out_run_by_run():
    runs = [f"{recipe}/seed_{i}.csv" for recipe in ("wild", "calm", "even") for i in range(6)]
    events = [run in ("wild/seed_0.csv", "wild/seed_3.csv", "wild/seed_5.csv") for run in runs]
    splits = split(runs, events, 0.3, 0)
    assert (splits.by, splits.only_eventful) == ("run", "wild/seed_0.csv")
    for held in splits.held:
        assert 0 < np.sum(held & np.array(events)) < 3, "both sides have something to find"
        for part in (slice(6, 12), slice(12, 18)):
            assert len(set(held[part].tolist())) == 1, "the other families stay whole"


def test_attempts_of_a_run_stay_together():
    runs = [f"seed_{i // 2}.csv" for i in range(12)]
    splits = split(runs, [i % 2 == 0 for i in range(12)], 0.3, 0)
    assert splits.held
    for held in splits.held:
        assert (held[0::2] == held[1::2]).all()


def tallies(in_time: np.ndarray, events: int = 10) -> list[OrderCounts]:
    """One per run: (runs, variants) events found in time, of ten."""
    zero = np.zeros(in_time.shape[1], np.int64)
    delay = np.full((in_time.shape[1], events), -1)
    return [OrderCounts(1000, each, delay, zero, zero) for each in in_time]


def judged(in_time: np.ndarray):
    runs = len(in_time)
    held = tuple(np.arange(runs) % 4 == k for k in range(4))
    return choose_policy(tallies(in_time), UNITS, Splits(held, "family", runs), "balance", 0.1)


def test_a_setting_that_is_good_on_every_run_is_taken():
    good = np.where(plateau((0.6, 0.4), 0.2), 9, 5)
    verdict = judged(np.tile(good, (12, 1)))
    assert verdict.take == verdict.choice.index != 0
    assert verdict.validation is not None
    assert verdict.validation.chosen.held_out == 0.9 > verdict.validation.base.held_out
    assert abs(verdict.validation.chosen.gap) < 1e-9


def test_a_setting_that_is_best_for_one_run_only_is_not_taken():
    """Every run has a favourite region of its own, and the base policy is fair everywhere."""
    rows = []
    for _ in range(8):
        centre = RNG.random(2) * 0.8 + 0.1
        rows.append(np.where(plateau((centre[0], centre[1]), 0.15), 10, 4))
    in_time = np.array(rows)
    in_time[:, 0] = 6
    verdict = judged(in_time)
    assert verdict.take == 0
    assert verdict.reason.startswith("keep the base policy")
    assert verdict.validation is not None
    assert verdict.validation.best.gap > 0.1, "what over-fitting would have promised"


def test_a_verdict_without_held_out_runs_is_marked():
    good = np.where(plateau((0.6, 0.4), 0.2), 9, 5)
    asked = choose_policy(
        tallies(good[None]), UNITS, Splits((), "", 1), "balance", 0.1, wanted=False
    )
    assert asked.take != 0
    assert "no runs were held out (--holdout 0)" in asked.reason


@pytest.mark.parametrize("objective", ["balance", "recall", "lost"])
def test_a_setting_that_no_held_out_event_supports_is_not_taken(objective):
    good = np.where(plateau((0.6, 0.4), 0.2), 9, 5)
    lost = np.where(plateau((0.6, 0.4), 0.2), 10, 900)
    runs = [each._replace(lost=lost) for each in tallies(good[None])]
    healthy = [each._replace(lost=lost) for each in tallies(np.zeros((4, len(UNITS)), int), 0)]
    held = tuple(np.arange(5) == k for k in range(1, 5))
    for splits, part in ((Splits((), "", 1), runs), (Splits(held, "family", 5), runs + healthy)):
        verdict = choose_policy(part, UNITS, splits, objective, 0.1)
        assert verdict.choice.index != 0
        assert verdict.take == 0
        assert "no split held out an event, so the choice cannot be checked" in verdict.reason


def test_settings_that_do_not_differ_teach_nothing():
    verdict = judged(np.full((12, len(UNITS)), 7))
    assert verdict.take == 0
    assert "all settings have the same score" in verdict.reason


def test_a_base_in_the_middle_is_kept():
    scores = np.where(plateau((0.6, 0.4), 0.2), 9, 5)
    UNITS_HERE = UNITS.copy()
    UNITS_HERE[0] = (0.6, 0.4)
    scores[0] = 9
    verdict = choose_policy(tallies(scores[None]), UNITS_HERE, Splits((), "", 1), "balance", 0.1)
    assert verdict.take == 0
    assert verdict.reason.startswith("keep the base policy")
    assert "cannot be checked" in verdict.reason, "reported when the base is kept, too"
