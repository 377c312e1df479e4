"""The verdict is computed, and can go against the demo."""

from __future__ import annotations

import math

import numpy as np
import pytest

from healcore.core.verdict import Action, Decision
from healcore.demo import corpus
from healcore.demo.history import History, Step
from healcore.demo.outcome import Outcome, broken_claims, outcome
from healcore.demo.rollbacks import Rollback
from healcore.demo.scenario import Scenario


@pytest.fixture(scope="module")
def text():
    return corpus.load()


@pytest.fixture(scope="module")
def scenario(text):
    return Scenario(text)


BACK = Rollback(112, ("LOSS_SPIKE",), 116, 90, True, 1.0, 0.5, (112, 113, 114, 115))


def _ended(arm: str, loss: float, *, stopped: bool = False) -> History:
    return History("torch", arm, held_out_loss=loss, ending="stopped" if stopped else "completed")


def _run(arm: str, loss: float, *back: Rollback | None) -> History:
    """A run with one training loss up to the empty batch, which ends as its arm is to end."""
    history = _ended(arm, math.nan if arm == "unprotected" else 2.0)
    history.steps = [Step(step, step, loss, 1.0, 0.1) for step in range(240)]
    history.rollbacks = tuple(each for each in back if each)
    return history


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e12, 3.5])
def test_nan_and_worse_than_frequencies_is_failed(text, loss):
    assert outcome(_ended("healed", loss), text) is Outcome.FAILED


def test_levels(text):
    between = (text.byte_pair_loss + text.byte_frequency_loss) / 2
    assert outcome(_ended("healed", between), text) is Outcome.NEITHER
    assert outcome(_ended("healed", text.byte_pair_loss - 0.01), text) is Outcome.TRAINED
    assert outcome(_ended("healed", 1.0, stopped=True), text) is Outcome.NEITHER


def test_claims_that_hold(scenario):
    runs = [_run("unprotected", 1e9), _ended("fixed clip", 2.0), _run("healed", 2.0, BACK)]
    assert broken_claims(runs, scenario) == []


def test_an_unprotected_run_that_trains_breaks_the_claim(scenario):
    (sentence,) = broken_claims([_ended("unprotected", 2.0)], scenario)
    assert sentence.startswith("the unprotected torch run of seed 0 did not fail")


def test_a_healed_run_that_does_not_train_breaks_the_claim(scenario):
    (sentence,) = broken_claims([_ended("healed", math.nan)], scenario)
    assert sentence.startswith("the healed torch run of seed 0 did not train")
    (sentence,) = broken_claims([_ended("healed", 2.0, stopped=True)], scenario)
    assert "stopped" in sentence


@pytest.mark.parametrize(
    ("plain", "healed", "back", "complaint"),
    [
        (2.5, 2.0, BACK, "had nothing to be saved from"),
        (1e9, 2e9, BACK, "has loss 2e+09 before the empty batch, and the unprotected 1e+09"),
        (1e9, math.nan, BACK, "has loss nan"),
        (1e9, 2.0, None, "did not go back when the learning rate was wrong"),
        (1e9, 2.0, BACK._replace(onset=20), "did not go back when the learning rate was wrong"),
        (1e9, 2.0, BACK._replace(known_good=False), "no checkpoint was known to be good"),
        (1e9, 2.0, BACK._replace(lr_scale=1.0), "went on with the same learning rate"),
    ],
)
def test_a_third_act_that_fails_breaks_the_claim(scenario, plain, healed, back, complaint):
    runs = [_run("unprotected", plain), _run("healed", healed, back)]
    (sentence,) = broken_claims(runs, scenario)
    assert complaint in sentence


def test_without_protection_nan_is_higher_than_any_loss(scenario):
    assert not broken_claims([_run("unprotected", math.nan), _run("healed", 2.0, BACK)], scenario)


def test_an_ending_that_the_events_do_not_tell_breaks_the_claim(scenario):
    healed = _run("healed", 2.0, BACK)
    healed.ending = None
    (sentence,) = broken_claims([_run("unprotected", 1e9), healed], scenario)
    assert "no completed ending" in sentence


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
        numbers = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1}
        history.record(step, batch=step, **numbers, decision=decision)
        assert seen == list(range(step))
    history.finish(np.float32(2.5))
    assert seen == [0, 1, 2]
    assert (history.skips, history.clips, history.count(Action.CUT_LR)) == (1, 1, 1)
    assert history.held_out_loss == 2.5


def test_spikes_are_counted_from_the_losses():
    history = History("torch", "unprotected")
    for step, loss in enumerate([2.0] * 10 + [3.0] + [2.0] * 5 + [math.nan] * 2):
        history.record(step, batch=step, loss=loss, grad_norm=1.0, learning_rate=0.1)
    history.finish(math.nan)
    assert history.spikes == 3
    assert history.mean_loss(until=10) == 2.0


def test_what_going_back_has_undone_is_told_apart():
    history = History("torch", "healed")
    # 0 to 5, back to 3, to 6 without batches 4 and 5, back to 1 and to the end.
    taken = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (3, 3), (4, 6), (1, 1), (2, 2)]
    history.steps = [Step(step, batch, 2.0, 1.0, 0.1) for step, batch in taken]
    assert [len(branch) for branch in history.branches] == [6, 2, 2]
    assert [[one.step for one in part] for part in history.given_up] == [[3, 4, 5], [3, 4]]
    assert [one.step for one in history.kept] == [0, 1, 2]
