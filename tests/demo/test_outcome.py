"""The verdict is computed, and can go against the demo."""

from __future__ import annotations

import math

import numpy as np
import pytest

from healcore.core.verdict import Action, Decision
from healcore.demo import corpus
from healcore.demo.history import History
from healcore.demo.outcome import Outcome, broken_claims, outcome


@pytest.fixture(scope="module")
def text():
    return corpus.load()


def _ended(arm: str, loss: float, *, stopped: bool = False) -> History:
    return History("torch", arm, held_out_loss=loss, stopped=stopped)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e12, 3.5])
def test_nan_and_worse_than_frequencies_is_failed(text, loss):
    assert outcome(_ended("healed", loss), text) is Outcome.FAILED


def test_levels(text):
    between = (text.byte_pair_loss + text.byte_frequency_loss) / 2
    assert outcome(_ended("healed", between), text) is Outcome.NEITHER
    assert outcome(_ended("healed", text.byte_pair_loss - 0.01), text) is Outcome.TRAINED
    assert outcome(_ended("healed", 1.0, stopped=True), text) is Outcome.NEITHER


def test_claims_that_hold(text):
    runs = [_ended("unprotected", math.nan), _ended("fixed clip", 2.0), _ended("healed", 2.0)]
    assert broken_claims(runs, text) == []


def test_an_unprotected_run_that_trains_breaks_the_claim(text):
    (sentence,) = broken_claims([_ended("unprotected", 2.0)], text)
    assert sentence.startswith("the unprotected torch run of seed 0 did not fail")


def test_a_healed_run_that_does_not_train_breaks_the_claim(text):
    (sentence,) = broken_claims([_ended("healed", math.nan)], text)
    assert sentence.startswith("the healed torch run of seed 0 did not train")
    (sentence,) = broken_claims([_ended("healed", 2.0, stopped=True)], text)
    assert "stopped" in sentence


def _neutral(**changes) -> Decision:
    one = np.float32(1)
    return Decision(one, np.False_, one, 0, 0, 0)._replace(**changes)


def test_history_reads_one_step_late_and_counts():
    seen = []
    history = History("torch", "healed", on_step=lambda _, step: seen.append(step.step))
    decisions = [
        _neutral(),
        _neutral(skip=np.True_, cause=8),
        _neutral(grad_scale=np.float32(0.5), action=int(Action.CUT_LR)),
    ]
    for step, decision in enumerate(decisions):
        last = history.record(step, loss=2.0, grad_norm=1.0, learning_rate=0.1, decision=decision)
        assert seen == list(range(step))
        assert (last.step if last else None) == (step - 1 if step else None)
    history.finish(np.float32(2.5))
    assert seen == [0, 1, 2]
    assert (history.skips, history.clips, history.count(Action.CUT_LR)) == (1, 1, 1)
    assert history.held_out_loss == 2.5


def test_spikes_are_counted_from_the_losses():
    history = History("torch", "unprotected")
    for step, loss in enumerate([2.0] * 10 + [3.0] + [2.0] * 5 + [math.nan] * 2):
        history.record(step, loss=loss, grad_norm=1.0, learning_rate=0.1)
    history.finish(math.nan)
    assert history.spikes == 3
    assert history.mean_loss(until=10) == 2.0
