"""Vanishing gradients, plateaus and overfitting: faults that show only over time."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.verdict import Cause
from tests.core.engine_runner import Runner, alarms, watching


def noise(steps: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=steps)


class TestVanishing:
    CONFIG = watching("vanishing", threshold=1e-6, patience=20)

    def run(self, norms) -> np.ndarray:
        return alarms(Runner(self.CONFIG).feed(grad_norm=norms), Cause.GRAD_VANISHING)

    def test_after_patience_steps_in_a_row(self):
        found = self.run([1.0] * 50 + [1e-9] * 30 + [1.0] * 5)
        assert np.flatnonzero(found).tolist() == list(range(69, 80))

    def test_nan_steps_do_not_count_and_do_not_reset(self):
        found = self.run([1e-9] * 10 + [np.nan] * 30 + [1e-9] * 10)
        assert np.flatnonzero(found).tolist() == [49]


class TestPlateau:
    def run(self, losses, **settings) -> np.ndarray:
        settings = {"window": 100, "patience": 3, **settings}
        return alarms(Runner(watching("plateau", **settings)).feed(loss=losses), Cause.PLATEAU)

    @pytest.mark.parametrize("offset", [3.0, 0.0, -3.0])
    def test_noise_without_progress_is_a_plateau(self, offset):
        found = self.run(offset + 0.1 * noise(1500))
        assert not found[:399].any()
        assert found[-1]

    @pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
    def test_progress_is_none_in_any_unit(self, unit):
        t = np.arange(3000)
        assert not self.run(unit * (5 - t / 1000 + 0.1 * noise(3000))).any()

    def test_the_alarm_ends_with_the_next_better_window(self):
        losses = np.concatenate([3 + 0.1 * noise(900), 1 + 0.1 * noise(150)])
        found = self.run(losses)
        assert found[890]
        assert not found[1000:].any()

    def test_sitting_at_chance_level_is_seen_after_one_window(self):
        losses = np.log(2) + 0.002 * noise(150)
        assert self.run(losses, chance_level=0.693147)[99:].all()
        assert not self.run(losses).any(), "opt-in"
        assert not self.run(losses - 0.2, chance_level=0.693147).any()

    def test_nan_does_not_enter_a_window(self):
        losses = np.log(2) + 0.002 * noise(150)
        found = self.run(np.insert(losses, 50, [np.nan] * 30), chance_level=0.693147)
        assert np.flatnonzero(found)[0] == 129


class TestOverfit:
    def run(self, train, evaluations: dict[int, float], **settings) -> np.ndarray:
        settings = {"max_gap": 1.0, "patience": 2, **settings}
        column = np.full(len(train), np.nan)
        column[list(evaluations)] = list(evaluations.values())
        runner = Runner(watching("overfit", **settings))
        return alarms(runner.feed(loss=train, eval_loss=column), Cause.OVERFIT)

    def test_two_wide_gaps_in_a_row(self):
        found = self.run(1 + 0.1 * noise(400), {100: 1.2, 200: 3.0, 300: 3.0})
        assert np.flatnonzero(found)[0] == 300

    def test_it_ends_with_a_good_evaluation(self):
        found = self.run(1 + 0.1 * noise(400), {100: 3.0, 200: 3.0, 300: 1.1})
        assert found[250]
        assert not found[300:].any()

    def test_negative_losses(self):
        assert self.run(-5 + 0.1 * noise(400), {100: -3.0, 200: -3.0})[200]
        assert not self.run(-5 + 0.1 * noise(400), {100: -4.9, 200: -4.9}).any()
