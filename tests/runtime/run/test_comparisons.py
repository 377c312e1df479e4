"""When weights are compared, with which anchors, what follows, and what it costs."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from healcore.errors import SignalError
from healcore.runtime.driver import NumberRange
from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.compare.credit import CREDIT_STEPS, MAX_DEBT, MAX_SHARE, STEP_COST
from healcore.runtime.run.compare.evidence import RECENT, SAMPLE_SIZE, STAKE, Anchor
from healcore.runtime.run.compare.step_history import StepHistory
from healcore.runtime.run.compare.suspicion import RESTART_POWER
from healcore.runtime.run.compare.trained_step import ObservedBatch, TrainedStep
from healcore.runtime.run.healthy_ranges import Held, HeldNorm
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.packed_values import PackedValues
from tests.runtime.run.toy_driver import LASTS, ToyRun, damaged, healthy, noisy

PER_STEP = MAX_SHARE * STEP_COST
"""Evaluations that a step of a healthy run pays for: 1 % of a step that costs three."""
MAX_CREDIT = CREDIT_STEPS * PER_STEP
THRESHOLD = HostPolicy.of("default").rollback.evidence
"""Evidence for a verdict: 10,000."""
TO_VERDICT = math.ceil(math.log(THRESHOLD, 1 + STAKE))
"""Comparisons in a row, all won by the earlier weights, until a verdict: 20."""
AGAIN = math.ceil(math.log(THRESHOLD / THRESHOLD**RESTART_POWER, 1 + STAKE))
"""Comparisons until a verdict that has waited is found again: 10."""
DAMAGE = 250
"""Step at which the weights are damaged, unless a test says otherwise."""
ROLLED_BACK = RollbackRecord(order=Order(index=299, onset=DAMAGE), step=300, continues_at=200)


def after(steps: int, loss: Any = noisy) -> ToyRun:
    run = ToyRun(loss)
    healthy(run, steps)
    return run


@pytest.mark.parametrize("alarm", [True, False], ids=["alarm", "no detector"])
def test_damage_that_lasts_is_found_after_twenty_comparisons(alarm):
    run = after(DAMAGE)
    verdict = damaged(run, alarm=alarm)
    assert run.assessments == ["worse"]
    assert verdict.anchor_step == 200, "the anchor with the lowest mean loss, although it is young"
    assert verdict.onset == DAMAGE
    assert verdict.found_at == DAMAGE + TO_VERDICT - 1
    assert verdict.due == DAMAGE + LASTS
    assert verdict.roll_back_at == verdict.due + AGAIN - 1
    assert verdict.evidence >= THRESHOLD
    assert verdict.rise > 1
    assert verdict.rise_remembered > 1
    assert run.holding.unusual_batches(verdict) == []


@pytest.mark.parametrize(
    ("loss", "by"),
    [
        (lambda weight, batch: 1000 * noisy(weight, batch) + 1e6, 0.0),
        (lambda weight, batch: abs(weight - 6.6) + 1, 5.0),
        (lambda weight, batch: 10.0, 5.0),
        (lambda weight, batch: math.nan, 5.0),
    ],
    ids=["another scale", "worse on the new data", "the same with any weights", "NaN"],
)
def test_a_loss_that_shows_nothing_about_the_weights_is_no_evidence(loss, by):
    run = after(250, lambda weight, batch: (loss if batch >= 250 else noisy)(weight, batch))
    assert damaged(run, by=by) is None
    assert not run.comparisons.has_evidence


def test_batches_and_norms_at_the_onset_that_are_unusual():
    """Three batches that the earlier weights find extraordinary, and a step with a large norm."""

    def loss(weight: float, batch: int) -> float:
        return noisy(weight, batch) + (50.0 if 250 <= batch < 253 else 0.0)

    run = ToyRun(loss)
    for _ in range(250):
        run.take(run.step, weight=10.0 / (1 + run.step / 50), norm=1.0)
    level, verdict = run.driver.weight + 5.0, None
    while verdict is None:
        norm = 4.0 if run.step == 255 else 2.0
        verdict = run.take(run.step, weight=level, alarm=True, norm=norm)
    assert run.holding.unusual_batches(verdict) == [250, 251, 252]
    assert run.holding.outside_ranges(verdict).norms == {"optimizer": HeldNorm(1.0, 4.0)}


def test_the_rates_and_the_first_alarm_of_the_trouble_are_reported():
    run = ToyRun(noisy)
    run.driver.rate = 0.25
    run.comparisons.anchors.clear()
    run.comparisons.add_anchor(0, run.restorable)
    healthy(run, 246)
    run.driver.rate = 8.0
    for _ in range(4):  # alarms, and the weights are not worse yet
        run.take(run.step, alarm=True)
    verdict = damaged(run)
    assert verdict.onset == 246
    assert verdict.healthy_rates == {"optimizer": 0.25}
    assert all(each == {"optimizer": 8.0} for each in verdict.rates)


@pytest.mark.parametrize("recovers", [TO_VERDICT + 10, LASTS - 2])
def test_a_run_that_recovers_before_a_rollback_would_pay_is_left_alone(recovers):
    """`recovers` is the number of steps from the damage to the recovery."""
    run = after(DAMAGE)
    assert damaged(run, TO_VERDICT) is None
    before = run.driver.evaluations
    assert damaged(run, recovers - TO_VERDICT, by=0.0) is None
    assert run.driver.evaluations == before, "nothing is evaluated while the run may recover"
    assert damaged(run, 300, by=-5.5, alarm=False) is None
    assert run.assessments == ["worse", "recovered"]
    assert not run.comparisons.has_evidence


def test_damage_soon_after_the_anchor_is_not_waited_for():
    """A rollback repeats little, and its evidence takes longer than that."""
    run = ToyRun(noisy, interval=8)
    healthy(run, DAMAGE)
    verdict = damaged(run)
    assert verdict.roll_back_at == verdict.found_at == DAMAGE + TO_VERDICT - 1
    assert verdict.anchor_step > DAMAGE - TO_VERDICT
    assert run.assessments == []


def test_frozen_steps_end_although_the_loss_fn_has_failed():
    run = after(250)
    run.comparisons.state.ranges.held = Held(frozen_steps=(251, 255))
    found = []
    for step in range(250, 258):
        if run.holding.freezing_changes(step):
            run.holding.update_freezing(step)
        found.append(run.holding.freezes)
        if step == 252:
            run.comparisons.loss_function.drop()
    assert found == [False, *[True] * 5, False, False]


def test_trouble_that_was_rolled_back_already_has_no_second_wait():
    """It has had its time to recover. Trouble after the rolled back steps has its own."""
    run = after(DAMAGE)
    run.record.ledger.rollbacks.append(ROLLED_BACK)
    verdict = damaged(run)
    assert verdict.roll_back_at == verdict.found_at == DAMAGE + TO_VERDICT - 1
    assert run.assessments == []
    later = after(350)
    later.record.ledger.rollbacks.append(ROLLED_BACK)
    assert damaged(later).roll_back_at > 350 + TO_VERDICT - 1
    assert later.assessments == ["worse"]


@pytest.mark.parametrize(
    ("loss", "by"),
    [
        (lambda weight, batch: math.nan if weight > 50 else noisy(weight, batch), 100.0),
        (lambda weight, batch: math.nan if batch % 4 == 0 else noisy(weight, batch), 5.0),
    ],
    ids=["with the current weights alone", "with both on some batches"],
)
def test_a_loss_of_nan(loss, by):
    """With the current weights alone it counts; with both it is no evidence against damage."""
    run = after(250, loss)
    assert damaged(run, by=by) is not None


def test_at_most_three_anchors_the_lowest_mean_loss_and_the_last_two_checkpoints():
    run = after(200)
    assert [each.step for each in run.comparisons.anchors] == [0, 100, 200]
    healthy(run, 500)
    assert [each.step for each in run.comparisons.anchors] == [500, 600, 700], "the loss falls"
    for _ in range(400):  # it rises, and comparisons with any weights show no damage
        run.take(run.step, loss=run.step / 100)
    assert [each.step for each in run.comparisons.anchors] == [700, 1000, 1100]


def test_an_anchor_is_compared_once_it_is_a_save_interval_old():
    """At the start half of the run is old enough, and eight steps at least."""
    run = ToyRun(noisy)

    def compared_at(index: int) -> list[int]:
        return [anchor.step for anchor in run.comparisons._eligible_anchors(index)]

    assert compared_at(SAMPLE_SIZE - 2) == []
    assert compared_at(SAMPLE_SIZE - 1) == [0]
    healthy(run, 250)
    assert compared_at(150) == [0]
    assert compared_at(199) == [100]
    assert compared_at(298) == [100]
    assert compared_at(299) == [200]


def test_suspect_weights_are_no_anchor_and_a_rollback_drops_later_ones():
    run = after(290)
    assert damaged(run) is not None
    assert [each.step for each in run.comparisons.anchors] == [0, 100, 200]
    run.comparisons.observe(TrainedStep(run.step, ()), 9.0, alarm=False, has_trained=True)
    run.comparisons.on_rollback(150)
    assert run.comparisons.credit.left == pytest.approx(MAX_CREDIT)
    assert not run.comparisons._dispatch_losses
    assert [(each.step, each.trained) for each in run.comparisons.anchors] == [(0, 150), (100, 50)]
    assert all(step.index < 150 for each in run.comparisons.anchors for step in each.sample)
    assert not run.comparisons.has_evidence


def test_an_accepted_level_is_not_compared_and_new_copies_are_made_after_it():
    run = after(250)
    run.comparisons.pause_until(400)
    assert not run.comparisons.anchors
    before = run.driver.evaluations
    assert damaged(run, 150) is None
    assert run.driver.evaluations == before
    healthy(run, 110)
    assert damaged(run, 300) is not None, "worse than the level that was accepted"


def test_a_rate_that_is_not_finite_can_be_saved():
    """JSON has no such numbers, and a save that raises loses the run's work."""
    run = ToyRun(noisy)
    run.driver.rate = math.nan
    healthy(run, 250)
    assert damaged(run, 10) is None
    assert run.comparisons.has_evidence
    text = json.dumps(asdict(run.comparisons.state), allow_nan=False)
    read = TypeAdapter(ComparisonState).validate_json(text, strict=True)
    assert read == run.comparisons.state
    assert [each.draw(1) for each in read.anchors] == [[]] * len(read.anchors)


def restarted(run: ToyRun) -> ToyRun:
    """What a new process knows of a run, from the text of its checkpoint."""
    text = json.dumps(asdict(run.comparisons.to_save()), allow_nan=False)
    saved = TypeAdapter(ComparisonState).validate_json(text, strict=True)
    packed = run.comparisons.batches_to_save()
    assert packed is not None
    batches = PackedValues.read(packed.state())
    other = ToyRun(run.loss_fn, interval=run.interval)
    other.step, other.driver.weight = run.step, run.driver.weight
    weights = {each.step: each.weights for each in run.comparisons.anchors}
    other.comparisons.continue_from(saved, weights, step=run.step, batches=batches)
    return other


@pytest.mark.parametrize("steps", [100, 130, 250, 255, 262, 275, 301])
def test_a_restart_compares_as_the_run_that_is_not_restarted(steps):
    """Losses and norms are usual until step 250; from then on the weights are damaged."""

    def go_on(run: ToyRun, until: int) -> Any:
        while run.step < until:
            healthy_weight = 10.0 / (1 + run.step / 50)
            bad = run.step >= 250
            verdict = run.take(
                run.step, weight=healthy_weight + 5.0 * bad, norm=4.0 if bad else 1.0
            )
            if verdict is not None:
                return verdict, run.holding.unusual_batches(verdict)
        return None

    undisturbed = ToyRun(noisy)
    assert go_on(undisturbed, steps) is None
    again = restarted(undisturbed)
    before, evaluations = undisturbed.driver.evaluations, again.driver.evaluations
    expected = go_on(undisturbed, 400)
    assert expected is not None
    assert go_on(again, 400) == expected
    checks = 3  # calls by which a new process checks the function
    made = again.driver.evaluations - evaluations - checks
    assert made == undisturbed.driver.evaluations - before, "the same comparisons"


def test_a_restart_has_the_credit_that_is_left():
    """With a full credit it would evaluate more often than the run that is not restarted."""
    run = ToyRun(noisy)
    full = run.comparisons.to_save().credit
    while run.step < 262:
        run.take(run.step, weight=10.0 / (1 + run.step / 50) + 5.0 * (run.step >= 250))
    left = run.comparisons.to_save().credit
    assert left is not None
    assert full is not None
    assert left < full
    assert restarted(run).comparisons.to_save().credit == left


@pytest.mark.parametrize(("wrong", "trouble"), [(KeyError("labels"), 0), (None, 40)])
def test_a_loss_fn_that_fails_later_is_not_called_again(wrong, trouble):
    """It raises, or gives no number while a verdict is pending: the run can end."""
    calls = []

    def loss(weight: float, batch: int) -> Any:
        if batch < 250 + trouble:
            return noisy(weight, batch)
        calls.append(batch)
        if wrong is not None:
            raise wrong
        return [1.0, 2.0]

    run = after(250, loss)
    assert damaged(run, trouble) is None
    for _ in range(LASTS):
        assert run.take(run.step, weight=9.0, alarm=True, loss=9.0) is None
    assert len(calls) == 1
    assert not run.comparisons.is_enabled
    assert run.comparisons.suspicion.decide_at_end(run.step - 1) is None
    assert not run.comparisons.anchors, "their memory is free"
    (line,) = run.warnings
    assert type(wrong or SignalError("")).__name__ in line


def test_parts_of_a_batch_count_by_their_weights():
    """The mean over an accumulation equals the training loss."""
    run = after(250, lambda weight, batch: weight + float(batch))
    step = TrainedStep(run.step, (ObservedBatch(1.0, 0.75), ObservedBatch(5.0, 0.25)))
    found: Any = run.comparisons.losses_of([step], run.comparisons.anchors[0])
    [now], [then] = found
    assert now == pytest.approx(run.driver.weight + 2.0)
    assert then == pytest.approx(10.0 + 2.0), "the first weight"


def test_an_anchor_whose_checkpoint_is_gone_is_dropped():
    run = after(300)
    run.restorable = {200, 300, 400}
    healthy(run, 100)
    assert [each.step for each in run.comparisons.anchors] == [200, 300, 400]
    run.restorable = set()
    healthy(run, 100)
    assert run.comparisons.anchors == []


def test_within_an_accumulation_nothing_is_compared():
    run = ToyRun(lambda weight, batch: weight + batch % 7)
    run.take(0)
    before = run.driver.evaluations  # of the check of the loss_fn
    run.driver.weight, run.driver.accumulates = 500.0, True
    for step in range(200):
        run.take(step, alarm=True)
    assert run.driver.evaluations == before
    assert run.comparisons.credit.left == pytest.approx(MAX_CREDIT), (
        "no more, however long it is not used"
    )


@pytest.mark.parametrize(("given", "free"), [(15.0, True), (9.0, False)])
def test_a_loop_that_observes_the_loss_fn_needs_one_call_less(given, free):
    """The loss_fn predicts the first loss with the weights before its update."""
    run = ToyRun(lambda weight, batch: weight + batch)
    run.driver.weight = 4.0
    run.take(5, loss=given)
    assert run.comparisons.loss_function.gives_loss is free


# -- credit, debt and the price of an evaluation --------------------------------------------------


@pytest.mark.parametrize(("alarm", "gives_loss"), [(False, False), (True, False), (True, True)])
def test_a_healthy_run_costs_at_most_one_percent(alarm, gives_loss):
    """And 30 evaluations at the start, also with alarms at every step."""
    run = ToyRun(noisy)
    run.comparisons.loss_function.gives_loss = gives_loss
    healthy(run, 5000, alarm=alarm)
    most = MAX_CREDIT + PER_STEP * 5000 + 4  # one comparison may begin with any credit
    assert run.driver.evaluations <= most
    if alarm:
        assert run.driver.evaluations > 0.8 * most


def test_the_debt_of_a_suspicion_is_bounded():
    """At most `MAX_DEBT / PER_STEP` = 1,333 steps without a comparison after any suspicion."""
    run = ToyRun(noisy)
    healthy(run, 1250, alarm=True)
    while run.comparisons.credit.left <= 0:
        healthy(run, 1)
    began = run.step
    level = run.driver.weight
    trouble = TO_VERDICT - 5  # too short for a verdict
    assert damaged(run, trouble) is None
    assert run.comparisons.has_evidence
    while run.comparisons.has_evidence:  # the weight falls again
        assert run.take(run.step, weight=level * 0.9, alarm=True) is None
    assert run.step - began < 3 * trouble + RECENT, "small wins end it once they are the usual"
    before = run.driver.evaluations
    began = run.step
    while run.driver.evaluations == before:
        healthy(run, 1, alarm=True)
    paid = MAX_DEBT / PER_STEP
    assert paid - 5 < run.step - began < paid + 5


def test_an_alarm_after_quiet_is_compared_without_credit_and_a_high_mean_loss_now_and_then():
    run = after(250)
    run.comparisons.credit.left = -20.0
    before = run.driver.evaluations
    run.take(run.step, alarm=True)
    assert run.driver.evaluations > before
    run.comparisons.credit.left = MAX_CREDIT
    before = run.driver.evaluations
    for _ in range(300):  # not above the last losses, but above the mean of the best anchor
        run.take(run.step, loss=5.0)
    assert before + 6 <= run.driver.evaluations < before + 50, (
        "after 10, 20, 40, 80, 100, ... steps"
    )


def test_unusual_steps_are_looked_for_where_the_trouble_began():
    history = StepHistory()
    for index in range(100):
        step, alarm = TrainedStep(index, ()), index in (10, 60)
        history.add(step, 1.0, alarm=alarm, healthy=True, norm_limits={})
    starts = []
    for onset, last in ((12, 99), (61, 99), (55, 50)):
        suspects = history.suspect_steps(onset, last)
        assert suspects is not None
        starts.append(suspects.start)
    assert starts == [10, 60, 10]


@pytest.mark.parametrize(("cost", "compared"), [(1 / 3, 10), (1.0, 3), (4.0, 0)])
def test_an_expensive_loss_fn_makes_regular_comparisons_rarer_and_alarms_no_less_heard(
    cost, compared
):
    """`cost` is in training steps. Nothing is measured, so no decision depends on the clock."""
    run = ToyRun(noisy, loss_fn_cost=cost)
    run.comparisons.loss_function.gives_loss = True  # one evaluation for each comparison
    healthy(run, 1000)
    assert run.driver.evaluations == compared
    assert damaged(run).found_at == 1000 + TO_VERDICT - 1


# -- the evidence of an anchor: its arithmetic, its theorem, its sample of batches ----------------


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_evidence_is_the_largest_product_of_any_run_of_comparisons(wins):
    """The bet's product from the best starting point, as a CUSUM is of a log-likelihood."""
    anchor = Anchor(0)
    for index, won in enumerate(wins):
        anchor.learn(index, 1.0 if won else -1.0)
    factors = [1 + STAKE if won else 1 - STAKE for won in wins]
    products = [math.prod(factors[start:]) for start in range(len(factors))]
    assert anchor.evidence == pytest.approx(max(products), rel=1e-9)
    assert (anchor.onset is None) == (anchor.evidence <= 1)
    if anchor.onset is not None:
        assert products[anchor.onset] == pytest.approx(anchor.evidence)
        assert wins[anchor.onset], "it begins with a comparison that was won"


def comparisons_until(c: float, rises: Iterator[float], most: int = 10_000) -> int:
    """Number of comparisons until the evidence reaches c, or `most`."""
    a = Anchor(0)
    for index, rise in enumerate(itertools.islice(rises, most)):
        a.learn(index, rise)
        if a.evidence >= c:
            return index + 1
    return most


def bet(rng: random.Random, chance: float) -> float:
    return 1.0 if rng.random() < chance else -1.0


HEALTHY: dict[str, Callable[[list[float], random.Random], float]] = {
    "coin": lambda past, rng: bet(rng, 0.5),
    # An even chance decides two comparisons at once, the second at one half or none.
    "swings": lambda past, rng: bet(rng, 0.5 * (len(past) % 2 == 0 or past[-1] > 0)),
    "heavy tails": lambda past, rng: math.tan(math.pi * (rng.random() - 0.5)),
    "rare losses": lambda past, rng: bet(rng, 0.5) * (50.0 if rng.random() < 0.05 else 1.0),
    "not finite": lambda past, rng: rng.choice([math.inf, -math.inf, 0.1, -0.1]),
}
"""Rises whose bet is fair at most, whatever the past."""


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_at_least_c_comparisons_to_a_false_order_on_average(name):
    c, rng = 20.0, random.Random(1)

    def rises() -> Iterator[float]:
        past: list[float] = []
        while True:
            past.append(HEALTHY[name](past, rng))
            yield past[-1]

    found = [comparisons_until(c, rises(), int(20 * c)) for _ in range(300)]
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((each - mean) ** 2 for each in found)) / len(found)
    assert mean + 3 * spread >= c


def test_damage_that_leaves_most_batches_unharmed_is_found():
    """The mean of the loss is much higher, although the current weights win on most batches."""
    rng = random.Random(3)
    for otherwise, most in ((-0.01, 100), (-3.0, 10_000)):
        rises = (3.0 if rng.random() < 0.4 else otherwise for _ in itertools.count())
        assert (comparisons_until(THRESHOLD, rises, most) < most) is (otherwise == -0.01)


def test_one_huge_rise_does_not_hide_the_others():
    """A huge rise counts as a usual rise, because a bet is at most 1."""
    rises = (1e9 if index == 5 else 1.0 for index in itertools.count())
    assert comparisons_until(THRESHOLD, rises) == TO_VERDICT


def filled(step: int, number: int) -> Anchor:
    a = Anchor(step)
    for index in range(number):
        a.add(TrainedStep(index, (ObservedBatch(index),)))
    return a


def test_the_sample_is_uniform_over_all_steps_since():
    """Of 40 steps each is kept with the chance 8 / 40, the first like the last."""
    runs = 3000  # the step seeds the sample
    counts = Counter(each.index for step in range(runs) for each in filled(step, 40).sample)
    expected = runs * SAMPLE_SIZE / 40
    chi2 = sum((counts[index] - expected) ** 2 / expected for index in range(40))
    assert chi2 < 72, "39 degrees of freedom: 99.9 % are below"


def test_a_sample_is_the_same_in_every_process():
    assert [e.index for e in filled(7, 100).sample] == [e.index for e in filled(7, 100).sample]
    assert [filled(7, 100).draw(3), filled(7, 100).draw(3)] == [filled(7, 100).draw(3)] * 2
    assert Anchor(0).draw(3) == []
    a = filled(3, 8)
    assert {step.index for _ in range(200) for step in a.draw(1)} == {*range(8)}


def test_past_batches_are_those_of_usual_steps_where_there_are_enough():
    """On a bad batch that the model has trained on, damaged weights are better."""
    anchor = filled(3, 4)
    for index in range(4, 60):
        anchor.add(TrainedStep(index, ()), is_usual=False)
    assert {step.index for _ in range(50) for step in anchor.draw(3)} == {0, 1, 2, 3}
    few = Anchor(3)
    for index in range(20):
        few.add(TrainedStep(index, ()), is_usual=index < 2)
    assert {step.index for _ in range(50) for step in few.draw(3)} == {s.index for s in few.sample}


def test_damage_is_found_although_the_model_fits_the_bad_batches_that_caused_it():
    """The batches of steps 250 to 269 are bad. Only damaged weights have a low loss there."""

    def loss(weight: float, batch: int) -> float:
        return 60.0 - 5 * weight if 250 <= batch < 270 else noisy(weight, batch)

    run = after(250, loss)
    assert damaged(run, alarm=True) is not None


def test_a_number_that_was_learnt_after_the_better_weights_counts_as_outside():
    """It was wrong from step 260 on, and shows from step 310 on: 300 was a healthy checkpoint."""
    run = ToyRun(noisy)
    right, wrong = NumberRange(0.9, 0.9, 0.9), NumberRange(0.9, 1.1, 1.1)
    for _ in range(310):
        run.driver.set = {"optimizer.momentum": wrong if run.step >= 260 else right}
        run.take(run.step, weight=10.0 / (1 + run.step / 50))
    assert run.comparisons.state.ranges.values.numbers["optimizer.momentum"].high == 1.1
    verdict = damaged(run)
    assert verdict.anchor_step == 300
    assert not run.holding.outside_ranges(verdict).numbers, "the newest better weights"
    all_older = run.comparisons.about_older_weights(verdict)
    (older,) = [each for each in all_older if each.anchor_step == 200]
    (held,) = run.holding.outside_ranges(older).numbers.values()
    assert (held.bounds.last, held.program_value) == (0.9, 1.1)


def test_the_onset_reaches_back_over_the_gaps_of_a_burst():
    """The first sign was ten steps before the first comparison with evidence."""
    run = after(250)
    run.take(run.step, weight=run.driver.weight, alarm=True)
    for _ in range(9):
        run.take(run.step, weight=run.driver.weight)
    assert damaged(run).onset == 250


@pytest.mark.parametrize("harmed", [1.0, 0.7], ids=["each batch is worse", "most are"])
@pytest.mark.parametrize("won", [3, AGAIN + 1], ids=["little evidence", "strong evidence"])
def test_at_the_end_of_the_data_the_kept_batches_decide(won, harmed):
    """All of them have to be worse after three comparisons, most of them with strong evidence.

    `won` is the number of comparisons that the earlier weights have won.
    """

    def loss(weight: float, batch: int) -> float:
        spared = batch < 250 and random.Random(batch).random() >= harmed
        return (10.0 - weight) / 20 if spared else noisy(weight, batch)

    run = after(DAMAGE, loss)
    level = run.driver.weight + 5.0
    while max(anchor.evidence for anchor in run.comparisons.anchors) < (1 + STAKE) ** won:
        assert run.take(run.step, weight=level, alarm=True) is None
    verdict = run.comparisons.suspicion.decide_at_end(run.step - 1)
    is_strong = won > 3
    assert (verdict is not None) == (harmed == 1.0 or is_strong)
    if verdict is not None:
        assert verdict.roll_back_at == run.step - 1, "the index of the newest step"
