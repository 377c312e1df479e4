"""The assessor alone: what it evaluates, with which weights, and its verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause
from healcore.runtime.incidents.assessment import (
    AssessmentResult,
    Assessor,
    HighLossPeriod,
    TrainedBatch,
)
from healcore.runtime.incidents.monitor import ActionRequest
from tests.healer.step_records import record

HIGH = int(Cause.LOSS_SPIKE)


class Weights:
    """A model whose loss on each batch is given in `now`."""

    def __init__(self) -> None:
        self.now: dict[Any, float] = {}

    def finite(self) -> bool:
        return True

    def losses_of(self, loss_fn: Any, batches: Any, state: Any = None) -> list[float]:
        return [loss_fn((self.now if state is None else state)[batch]) for batch in batches]


def step(loss: float, cause: int = 0, z: float = 0.0) -> list[StepRecord]:
    return [record(cause=Cause(cause), incident_open=bool(cause), loss=loss, z_loss=z)]


def alarmed(now: dict[str, float], loss: float, z: float) -> tuple[Weights, Assessor]:
    """Two remembered batches, `a` of loss 1 and `b` of 3; then an alarm at `new`."""
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index, (batch, before) in enumerate((("a", 1.0), ("b", 3.0))):
        assessor.observe(16 * index, batch, step(before))
    weights.now = now
    assessor.observe(40, "new", step(loss, Cause.LOSS_SPIKE, z))
    return weights, assessor


def order(index: int) -> ActionRequest:
    return ActionRequest(Action.ROLLBACK, 1, 40, 40, index, Cause.LOSS_SPIKE, (), False, 12.0)


def asked(now: dict[str, float], loss: float, z: float = 100.0) -> AssessmentResult:
    return alarmed(now, loss, z)[1].assess(order(60))


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ({"a": 1.0, "b": 3.0, "new": 12.0}, "data"),
        ({"a": 11.0, "b": 13.0, "new": 12.0}, "damage"),
        ({"a": 3.4, "b": 5.4, "new": 12.0}, "data"),  # below a quarter of the step's rise
        ({"a": 3.6, "b": 5.6, "new": 12.0}, "unknown"),
        ({"a": 5.9, "b": 7.9, "new": 12.0}, "unknown"),  # below half of the step's rise
        ({"a": 6.1, "b": 8.1, "new": 12.0}, "damage"),
        ({"a": 20.9, "b": 22.9, "new": 12.0}, "damage"),
        ({"a": 21.1, "b": 23.1, "new": 12.0}, "unknown"),  # above twice: forgotten, or broken
        ({"a": 11.0, "b": 13.0, "new": 3.0}, "unknown"),  # `new` has been learnt: at what rate?
        ({"a": 1.0, "b": 23.0, "new": 12.0}, "unknown"),  # one domain of two
        ({"a": math.nan, "b": 3.0, "new": 12.0}, "damage"),
    ],
)
def test_the_parts_of_the_rise(now, verdict):
    assert asked(now, loss=12.0).verdict.value == verdict


def test_all_losses_are_those_of_the_present_weights():
    """Where a model breaks they change by orders of magnitude until the alarm has arrived."""
    found = asked({"a": 20_000.0, "b": 24_000.0, "new": 25_000.0}, loss=150_000.0, z=1e5)
    assert found.verdict.value == "damage"
    assert found.rise == 25_000.0 - 2.0
    assert found.rise_remembered == 22_000.0 - 2.0


@pytest.mark.parametrize(("now", "verdict"), [(7.1, "damage"), (6.9, "unknown")])
def test_a_loss_that_comes_back_by_itself_is_no_damage(now, verdict):
    """The step was 10 above the usual when it was taken; all batches are `now - 2` above it now."""
    losses = {"a": now - 1, "b": now + 1, "new": now}
    _, assessor = alarmed(losses, loss=12.0, z=10.0)
    assert assessor.assess(order(60)).verdict.value == verdict


@pytest.mark.parametrize(
    ("z", "later", "verdict"),
    [
        (10.0, 5.1, "damage"),
        (10.0, 4.9, "open"),
        (10.0, math.nan, "damage"),
        (100.0, 4.3, "damage"),  # less than half of the rise, and still 33 noise units
        (100.0, 4.1, "open"),
        (1e5, 1.1, "damage"),
    ],
)
def test_a_rise_must_last(z, later, verdict):
    """As swings at the edge of stability do not: asked once more with the weights of then."""
    weights, assessor = alarmed({"a": 9.0, "b": 11.0, "new": 12.0}, loss=12.0, z=z)
    assert assessor.assess(order(41)).verdict.value == "open"
    weights.now = {"a": 1.0 + later - 1.0, "b": 3.0 + later - 1.0, "new": 12.0}
    found = assessor.assess(order(56))
    assert found.verdict.value == verdict
    assert found.rise_remembered == pytest.approx(later - 1.0, nan_ok=True)


def test_a_loss_that_has_come_back_may_go_up_again():
    """In the same incident the remembered batches are still there to be asked."""
    weights, assessor = alarmed({"a": 9.0, "b": 11.0, "new": 12.0}, loss=12.0, z=10.0)
    for index, rise, verdict in ((60, 1.0, "open"), (80, 1.0, "open"), (100, 9.0, "damage")):
        weights.now = {"a": 1.0 + rise, "b": 3.0 + rise, "new": 12.0}
        assert assessor.assess(order(index)).verdict.value == verdict


@pytest.mark.parametrize("low_at", [41, 47, 55])
def test_a_model_that_was_back_within_the_last_16_steps_is_not_damaged(low_at):
    """At the edge of stability the loss swings for dozens of steps: every order finds it high."""
    weights, assessor = alarmed({"a": 9.0, "b": 11.0, "new": 12.0}, loss=12.0, z=10.0)
    high = weights.now
    for index in range(41, low_at + 16):
        weights.now = {"a": 1.2, "b": 3.2, "new": 12.0} if index == low_at else high
        assessor.observe(index, "new", step(12.0, Cause.LOSS_SPIKE))
        if index >= max(low_at, 56):
            assert assessor.assess(order(index)).verdict.value == "open"
    assert assessor.assess(order(low_at + 16)).verdict.value == "damage"


def test_an_easy_batch_does_not_show_that_the_model_was_back():
    """A step's own loss may be low by chance; only remembered batches are compared."""
    _, assessor = alarmed({"a": 9.0, "b": 11.0, "new": 12.0}, loss=12.0, z=10.0)
    for index in range(41, 56):
        assessor.observe(index, "easy", step(0.0, Cause.LOSS_SPIKE))
    assert assessor.assess(order(56)).verdict.value == "damage"


@pytest.mark.parametrize(("rise", "verdict"), [(9.0, "damage"), (3.9, "data"), (0.0, "data")])
def test_skipped_steps_do_not_repair_what_the_steps_before_them_have_damaged(rise, verdict):
    """Ten steps in a row are not finite: only the steps before them can be a reason to go back."""
    weights, assessor = alarmed({"a": 9.0, "b": 11.0, "new": 12.0}, loss=12.0, z=10.0)
    weights.now = {"a": 1.0 + rise, "b": 3.0 + rise}
    found = assessor.assess(order(51)._replace(cause=Cause.NONFINITE_LOSS))
    assert found.verdict.value == verdict


def test_batches_that_are_not_finite_need_not_last():
    _, assessor = alarmed({"a": math.nan, "b": 3.0, "new": 12.0}, loss=12.0, z=10.0)
    assert assessor.assess(order(41)).verdict.value == "damage"


def test_a_batch_that_cannot_be_evaluated_again_gives_no_verdict():
    weights, assessor = alarmed({"a": 9.0, "b": 11.0, "new": 12.0}, loss=12.0, z=10.0)
    weights.now = {}
    assert assessor.assess(order(60)).verdict.value == "unknown"


def unstable(now: float, then: float, *, at_checkpoint: float = 2.0) -> AssessmentResult:
    """Losses of 2, an alarm for instability at one of 12, and that batch with both weights."""
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index in range(40):
        assessor.observe(index, f"b{index}", step(at_checkpoint if index == 20 else 2.0))
    weights.now = {"new": now}
    assessor.observe(40, "new", step(12.0, Cause.INSTABILITY))
    found = assessor.assess(order(42)._replace(cause=Cause.INSTABILITY))
    assert (found.verdict.value, found.by) == ("damage", "instability")
    return assessor.with_earlier(found, 20, {"new": then})


@pytest.mark.parametrize(
    ("now", "then", "verdict"),
    [
        (12.0, 2.0, "damage"),
        (12.0, 6.9, "damage"),
        (12.0, 7.1, "data"),  # half of the rise is there with the earlier weights too
        (12.0, 30.0, "data"),
        (1e9, 30.0, "damage"),
        (6.0, 5.9, "damage"),  # the loss has come back in part: the model swings
        (6.0, 6.1, "open"),  # it is as good as with the earlier weights
        (1.9, 2.0, "open"),
        (math.nan, 2.0, "damage"),
        (math.nan, 30.0, "damage"),
        (math.nan, math.nan, "data"),
    ],
)
def test_a_loss_that_is_as_high_with_earlier_weights_is_no_instability(now, then, verdict):
    found = unstable(now, then)
    assert found.verdict.value == verdict
    assert found.by == ("instability" if verdict == "damage" else "earlier_weights")


@pytest.mark.parametrize(("others", "verdict"), [(30.0, "data"), (2.0, "damage")])
def test_an_instability_is_no_matter_of_one_batch(others, verdict):
    """The batch of its alarm alone is better with the earlier weights; the three before decide."""
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index in range(40):
        assessor.observe(index, f"b{index}", step(2.0))
    batches = [f"new{index}" for index in range(4)]
    weights.now = {f"b{index}": 2.0 for index in range(40)} | dict.fromkeys(batches, 20.0)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        assessor.observe(40 + index, batch, step(20.0, Cause.INSTABILITY if last else HIGH))
    found = assessor.assess(order(45)._replace(cause=Cause.INSTABILITY))
    then = dict.fromkeys(batches, others) | {batches[-1]: 2.0}
    assert assessor.with_earlier(found, 20, then).verdict.value == verdict


@pytest.mark.parametrize(("of_alarm", "ordinary"), [(2.0, True), (8.0, False)])
def test_the_batch_of_the_first_alarm_shows_whether_the_data_are_ordinary(of_alarm, ordinary):
    """With the earlier weights; the remembered batches, `a` and `b`, are as before with them."""
    _, assessor = alarmed({"a": 11.0, "b": 13.0, "new": 12.0}, loss=12.0, z=10.0)
    damaged = assessor.assess(order(60))
    found = assessor.with_earlier(damaged, 0, {"a": 1.0, "b": 3.0, "new": of_alarm})
    assert found.verdict.value == "damage"
    assert found.data_ordinary == ordinary


def test_earlier_weights_may_be_worse_by_what_has_been_learnt_since():
    assert unstable(12.0, 8.0).verdict.value == "data"
    assert unstable(12.0, 8.0, at_checkpoint=8.0).verdict.value == "damage"


@pytest.mark.parametrize(("then", "verdict"), [(2.0, "damage"), (11.0, "data")])
def test_remembered_batches_rise_with_the_loss_function_too(then, verdict):
    _, assessor = alarmed({"a": 11.0, "b": 13.0, "new": 12.0}, loss=12.0, z=10.0)
    damaged = assessor.assess(order(60))
    assert damaged.verdict.value == "damage"
    found = assessor.with_earlier(damaged, 0, {"a": then - 1.0, "b": then + 1.0})
    assert found.verdict.value == verdict


def looked_back(
    now: dict[str, float], then: dict[str, float], *, apart: float = 0.01
) -> AssessmentResult:
    """Four remembered batches, an alarm, high losses; the latest four batches are `x` of loss 6.

    Losses of `now` are made to differ by the share `apart`.
    """
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index, loss in enumerate((1.0, 1.2, 0.9, 1.1)):
        assessor.observe(16 * index, f"b{index}", step(loss))
    weights.now = {f"b{index}": 1.0 for index in range(4)} | {"new": 9.0}
    assessor.observe(64, "new", step(9.0, Cause.LOSS_SPIKE, 100.0))
    for index in range(65, 80):
        assert assessor.high_loss_to_review() is None
        assessor.observe(index, f"x{index % 4}", step(6.0))
    period = assessor.high_loss_to_review()
    assert period is not None
    assert period.onset == 64
    assert [each.index for each in period.latest] == [76, 77, 78, 79]
    weights.now = {
        name: loss * (1 + apart * (-1) ** i) for i, (name, loss) in enumerate(now.items())
    }
    return assessor.review(period, then)


BEFORE, LATEST = [f"b{i}" for i in range(4)], [f"x{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("before", "latest", "one", "verdict"),
    [
        (2.0, 6.0, 6.0, "damage"),  # the earlier weights: 1 everywhere
        (1.0, 6.0, 6.0, "data"),  # as good as they were on what came before
        (0.5, 0.5, 0.5, "data"),  # better
        (2.0, 6.0, 0.9, "data"),  # one of the latest batches has been learnt
        (2.0, 1.0, 1.0, "data"),
        (2.0, math.nan, 6.0, "damage"),  # finite with the earlier weights
    ],
)
def test_earlier_weights_have_to_be_better_on_every_batch(
    before: float, latest: float, one: float, verdict: str
):
    now = dict.fromkeys(BEFORE, before) | dict.fromkeys(LATEST, latest) | {"x3": one}
    then = dict.fromkeys([*BEFORE, *LATEST, "new"], 1.0)
    assert looked_back(now, then).verdict.value == verdict


@pytest.mark.parametrize(("of_first", "ordinary"), [(1.0, True), (6.0, False)])
def test_earlier_weights_show_whether_the_data_of_the_trouble_were_different(
    of_first: float, ordinary: bool
):
    """In training the first four lost 9, 6, 6 and 6; those before them about 1."""
    now = dict.fromkeys(BEFORE, 2.0) | dict.fromkeys(LATEST, 8.0)
    then = dict.fromkeys(BEFORE, 1.0) | dict.fromkeys(LATEST, 1.0) | {"x3": 1.0}
    then |= dict.fromkeys(["x0", "x1", "x2"], of_first) | {"new": of_first}
    found = looked_back(now, then)
    assert found.verdict.value == "damage"
    assert found.data_ordinary is ordinary


@pytest.mark.parametrize(("apart", "verdict"), [(0.0, "data"), (0.01, "damage")])
def test_batches_that_are_all_alike_are_one(apart, verdict):
    """In full-batch gradient descent eight evaluations are one, without an error of the mean."""
    then = dict.fromkeys((*BEFORE, *LATEST, "new"), 1.0)
    now = dict.fromkeys(then, 2.0)
    assert looked_back(now, then, apart=apart).verdict.value == verdict


def test_a_skipped_batch_is_no_evidence_of_a_high_loss():
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index in range(4):
        assessor.observe(16 * index, index, step(1.0 + 0.1 * index))
    weights.now = dict.fromkeys(range(4), 1.0) | {"new": 9.0, "bad": math.nan}
    assessor.observe(64, "new", step(9.0, Cause.LOSS_SPIKE, 100.0))
    skipped = [record(cause=Cause.NONFINITE_LOSS, skip=True, loss=9.0)]
    for index in range(65, 80):
        assessor.observe(index, "new", skipped if index % 4 == 0 else step(9.0))
    period = assessor.high_loss_to_review()
    assert period is not None
    assert [each.index for each in period.latest] == [75, 77, 78, 79]


@pytest.mark.filterwarnings("error")
def test_one_step_that_was_not_skipped_shows_nothing():
    _, assessor = alarmed({"a": 1.0, "b": 3.0, "new": 12.0}, loss=12.0, z=10.0)
    period = HighLossPeriod(40, [TrainedBatch(0, "a", 1.0), TrainedBatch(16, "b", 3.0)])
    period.add(40, "new", 12.0, skipped=False)
    found = assessor.review(period, {"a": 0.5, "b": 2.5, "new": 2.0})
    assert found.verdict.value == "unknown"


def test_a_loss_that_is_back_is_not_looked_at():
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index in range(4):
        assessor.observe(16 * index, index, step(1.0 + 0.1 * index))
    weights.now = dict.fromkeys(range(4), 1.0) | {"new": 9.0}
    assessor.observe(64, "new", step(9.0, Cause.LOSS_SPIKE, 100.0))
    for index in range(65, 200):
        assessor.observe(index, "new", step(1.5))  # within the spread of the four above the highest
        assert assessor.high_loss_to_review() is None
