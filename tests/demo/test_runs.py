"""The record of a run, and the claims about it, which are computed and can be broken."""

from __future__ import annotations

import math

import pytest

from healcore.demo.runs import DemoRun, Outcome, Step, check_claims, classify, with_short_probation
from healcore.demo.scenario import Scenario, load_corpus
from healcore.policy import load


def test_the_mean_loss_is_of_the_steps_before_a_batch():
    run = DemoRun("torch", "unprotected")
    run.steps = [Step(step, step, 3.0 if step < 5 else 2.0, 1.0) for step in range(30)]
    run.steps[28] = Step(28, 28, math.nan, 1.0)
    assert run.mean_loss(until=10, over=5) == 2.0
    assert run.mean_loss(until=10) == 2.5
    assert math.isnan(run.mean_loss(until=30))


def test_undone_steps_do_not_count():
    run = DemoRun("torch", "healed")
    # 0 to 5, back to 3, to 4 without batches 4 and 5, back to 1 and to the end.
    taken = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (3, 3), (4, 6), (1, 1), (2, 2)]
    run.steps = [Step(step, batch, float(row), 1.0) for row, (step, batch) in enumerate(taken)]
    assert run.mean_loss(until=10, over=2) == 8.5  # rows 8 and 9
    assert run.mean_loss(until=10) == 17 / 3  # and row 0


def test_only_the_probation_of_a_policy_is_changed():
    policy = load("default")
    assert with_short_probation(policy).rollback.probation == 20
    back = {"rollback": policy.rollback}
    assert with_short_probation(policy).model_copy(update=back) == policy


# -- claims --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text():
    return load_corpus()


@pytest.fixture(scope="module")
def scenario(text):
    return Scenario(text)


BACK = {
    "kind": "rollback",
    "onset": 112,
    "checkpoint": 90,
    "initial": False,
    "lr": 0.08,
    "lr_limit": 0.02,
}


def _ended(arm: str, loss: float, ending: str | None = "completed") -> DemoRun:
    events = [{"kind": "end", "ending": ending}] if ending else []
    return DemoRun("torch", arm, held_out_loss=loss, events=events)


def _run(arm: str, loss: float, *back: dict | None) -> DemoRun:
    """A run with one training loss up to the empty batch, which ends as its arm is to end."""
    run = _ended(arm, math.nan if arm == "unprotected" else 2.0)
    run.steps = [Step(step, step, loss, 1.0) for step in range(240)]
    run.events = [*(each for each in back if each), *run.events]
    return run


def broken(runs, scenario):
    return [claim.text for claim in check_claims(runs, scenario) if not claim.holds]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e12, 3.5])
def test_nan_and_worse_than_frequencies_is_failed(text, loss):
    assert classify(_ended("healed", loss), text) is Outcome.FAILED


def test_levels(text):
    between = (text.byte_pair_loss + text.byte_frequency_loss) / 2
    assert classify(_ended("healed", between), text) is Outcome.NEITHER
    assert classify(_ended("healed", text.byte_pair_loss - 0.01), text) is Outcome.TRAINED
    assert classify(_ended("healed", 1.0, "stopped"), text) is Outcome.NEITHER


def test_claims_that_hold(scenario):
    runs = [_run("unprotected", 1e9), _ended("fixed clip", 2.0), _run("healed", 2.0, BACK)]
    found = check_claims(runs, scenario)
    assert [claim.text for claim in found if not claim.holds] == []
    assert [claim.text for claim in found] == [
        "torch unprotected: fails, no better than byte frequencies "
        f"({scenario.corpus.byte_frequency_loss:.2f}) on unseen text: NaN",
        "torch healed: trains, better than byte pairs "
        f"({scenario.corpus.byte_pair_loss:.2f}) on unseen text: 2.00",
        "torch healed: runs to its end: completed",
        "torch unprotected: diverges before the empty batch: 1e+09",
        "torch healed: has a lower loss before the empty batch: 2.00, unprotected 1e+09",
        "torch healed: rolls back while the learning rate is wrong: step 112",
        "torch healed: rolls back to a known-good checkpoint: step 90",
        "torch healed: lowers the rate: learning rate at most 0.02 (the schedule had come to 0.08)",
    ]


def test_an_unprotected_run_that_trains_breaks_the_claim(scenario):
    (text,) = broken([_ended("unprotected", 2.0)], scenario)
    assert text.startswith("torch unprotected: fails")
    assert text.endswith("2.00")


def test_a_healed_run_that_does_not_train_breaks_the_claim(scenario):
    (text,) = broken([_ended("healed", math.nan)], scenario)
    assert text.startswith("torch healed: trains")
    assert text.endswith("NaN")
    (text,) = broken([_ended("healed", 2.0, "stopped")], scenario)
    assert text == "torch healed: runs to its end: stopped"


@pytest.mark.parametrize(
    ("plain", "healed", "back", "complaint"),
    [
        (2.5, 2.0, BACK, "diverges before the empty batch: 2.50"),
        (1e9, 2e9, BACK, "lower loss before the empty batch: 2e+09, unprotected 1e+09"),
        (1e9, math.nan, BACK, "lower loss before the empty batch: NaN"),
        (1e9, 2.0, None, "rolls back while the learning rate is wrong: never"),
        (1e9, 2.0, BACK | {"onset": 20}, "rolls back while the learning rate is wrong: never"),
        (
            1e9,
            2.0,
            BACK | {"initial": True},
            "known-good checkpoint: step 90, the initial one",
        ),
        (1e9, 2.0, BACK | {"lr_limit": 0.08}, "lowers the rate: no"),
    ],
)
def test_a_rollback_that_does_not_save_the_run_breaks_a_claim(
    scenario, plain, healed, back, complaint
):
    (text,) = broken([_run("unprotected", plain), _run("healed", healed, back)], scenario)
    assert complaint in text


def test_without_protection_nan_is_higher_than_any_loss(scenario):
    assert not broken([_run("unprotected", math.nan), _run("healed", 2.0, BACK)], scenario)


def test_an_ending_that_the_events_do_not_have_breaks_the_claim(scenario):
    healed = _run("healed", 2.0, BACK)
    healed.events = [BACK]
    (text,) = broken([_run("unprotected", 1e9), healed], scenario)
    assert text == "torch healed: runs to its end: not known"
