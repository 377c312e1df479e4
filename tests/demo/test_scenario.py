"""Data and faults depend on the step, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.demo.scenario import Scenario, load_corpus


@pytest.fixture(scope="module")
def text():
    return load_corpus()


def test_a_batch_is_that_of_its_step(text):
    scenario, again = Scenario(text), Scenario(text).training_batch(7)
    assert np.array_equal(scenario.training_batch(7).tokens, again.tokens)
    assert not np.array_equal(scenario.training_batch(8).tokens, again.tokens)


def test_the_faults_are_at_the_listed_places(text):
    scenario = Scenario(text)
    for step in range(scenario.steps):
        tokens, weights = scenario.training_batch(step)
        assert tokens.shape == (16, 65)
        assert tokens.dtype == np.int32
        # Nearly all of the text is ASCII, and half of the random bytes are not.
        assert ((tokens >= 128).mean() > 0.3) == (step in scenario.corrupted_batches)
        assert (weights.sum() == 0) == (step == scenario.empty_batch)
    assert len(scenario.corrupted_batches) == 4


def test_the_learning_rate_is_sixteen_times_too_high_for_a_while(text):
    meant, wrong = Scenario(text, lr_factor=1.0), Scenario(text)
    for step in range(wrong.steps):
        factor = 16.0 if step in wrong.wrong_lr_steps else 1.0
        assert wrong.learning_rate(step) == pytest.approx(factor * meant.learning_rate(step))
    assert max(map(meant.learning_rate, range(meant.steps))) <= meant.peak_rate
