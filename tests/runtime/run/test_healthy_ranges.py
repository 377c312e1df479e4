"""What is learnt as healthy, what counts as outside of it, and when a hold ends."""

import json
import math
import warnings
from dataclasses import asdict
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from healcore.policy import engine_of
from healcore.runtime.driver import NumberRange
from healcore.runtime.run.healthy_ranges import (
    HealthyNumber,
    HealthyRanges,
    HealthyValues,
    Held,
    HeldNorm,
    HeldNumber,
)
from healcore.runtime.run.rollback.rate_limits import limit_rates
from tests.healer.step_records import record


def constant(value: float) -> NumberRange:
    return NumberRange(value, value, value)


def learnt(*seen: NumberRange, name: str = "optimizer.weight_decay") -> HealthyRanges:
    """Ranges after one healthy checkpoint for each of `seen`."""
    ranges = HealthyRanges()
    for each in seen:
        ranges.learn({}, {name: each}, {})
    return ranges


def numbers_outside(ranges: HealthyRanges, seen: NumberRange) -> dict[str, HeldNumber]:
    found = ranges.values.outside({"optimizer.weight_decay": seen}, {})
    return found.numbers


def test_any_change_of_a_number_that_never_changed_is_outside():
    ranges = learnt(constant(0.05), constant(0.05))
    assert numbers_outside(ranges, constant(0.05)) == {}
    (held,) = numbers_outside(ranges, NumberRange(0.05, 100.0, 0.05)).values()
    assert held == HeldNumber(bounds=constant(0.05), program_value=100.0), "although it is back now"
    (held,) = numbers_outside(ranges, NumberRange(0.0, 0.05, 0.05)).values()
    assert held.program_value == 0.0


def test_the_range_has_all_values_of_healthy_steps_and_the_last_one_is_held():
    ranges = learnt(constant(0.9), NumberRange(0.8, 0.95, 0.9))
    assert numbers_outside(ranges, NumberRange(0.8, 0.95, 0.95)) == {}
    (held,) = numbers_outside(ranges, NumberRange(0.5, 0.95, 0.5)).values()
    assert held.bounds.last == 0.9


def test_a_number_that_was_never_seen_at_a_healthy_checkpoint_is_not_held():
    assert numbers_outside(HealthyRanges(), constant(0.5)) == {}


@pytest.mark.parametrize("shape", ["linear", "cos"])
def test_a_schedule_of_momentum_is_inside_of_its_range(shape: Literal["linear", "cos"]):
    """At every step of OneCycleLR, from the second healthy checkpoint on."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 1000, anneal_strategy=shape)
    ranges = HealthyRanges()
    low = 1.0
    high = 0.0
    outside = 0
    for step in range(1000):
        value = optimizer.param_groups[0]["momentum"]
        low = min(low, value)
        high = max(high, value)
        seen = NumberRange(low, high, value)
        if step % 100 == 0:
            ranges.learn({}, {"optimizer.weight_decay": seen}, {})
        elif step > 100:
            outside += bool(numbers_outside(ranges, seen))
        optimizer.step()
        schedule.step()
    assert outside == 0
    assert numbers_outside(ranges, NumberRange(low, 0.999, 0.999))


def test_a_held_number_is_not_learnt_and_is_released_when_the_program_sets_a_healthy_value():
    ranges = learnt(constant(0.05))
    wrong = NumberRange(0.05, 100.0, 100.0)
    ranges.held = Held(numbers=numbers_outside(ranges, wrong), until=250)
    name = "optimizer.weight_decay"
    assert not ranges.release(200, {name: constant(0.05)}), "the fault is still to come"
    assert not ranges.release(300, {name: wrong})
    ranges.learn({}, {name: wrong}, {})
    assert ranges.values.numbers[name] == HealthyNumber(0.05, 0.05, 0.05)
    released = ranges.release(400, {name: NumberRange(0.05, 100.0, 0.05)})
    assert [*released] == [name]
    assert not ranges.held


def test_a_number_that_the_program_keeps_outside_for_long_is_intended():
    """The repeat looks better for as long as it is held: a regulariser costs training loss."""
    held = {"w": HeldNumber(constant(0.0), 3.0), "b": HeldNumber(constant(0.9), None)}
    ranges = HealthyRanges(held=Held(numbers=held, until=720))
    seen = {"w": constant(3.0), "b": constant(math.nan)}
    assert ranges.lasting_numbers(900, seen, after=200) == {}, "a fault may last as long"
    lasting = ranges.lasting_numbers(1000, seen, after=200)
    assert lasting == {"w": 3.0}, "NaN is never intended"
    ranges.held = ranges.held.without_numbers(lasting)
    ranges.learn({}, {"w": constant(3.0)}, {})
    assert ranges.values.numbers["w"].high == 3.0


def test_a_limit_of_the_norm_stays_and_follows_the_typical_norm_of_the_program():
    """An unusual norm comes at single steps: that the last one is over says nothing."""
    ranges = HealthyRanges(held=Held(norms={"a": HeldNorm(1.0, 4096.0)}, until=150))
    ranges.follow_norms(100, {"a": 0.1})
    assert ranges.held.norms["a"].typical is None, "the trouble is still to come"
    limits = []
    for step, typical in ((200, 0.5), (300, 0.4), (400, 0.5), (500, 1.0)):
        ranges.follow_norms(step, {"a": typical, "b": 9.0})
        limits.append(ranges.held.norm_limits["a"])
    assert limits == [1.0, 1.0, 1.0, 2.0]
    ranges.follow_norms(600, {})
    assert ranges.held.norm_limits == {"a": 2.0}


def test_a_second_hold_adds_what_is_newly_unusual_and_keeps_the_limits_of_the_first():
    first = Held(norms={"a": HeldNorm(1.0, 9.0)}, until=10)
    second = Held(norms={"a": HeldNorm(3.0, 9.0), "b": HeldNorm(2.0, 8.0)}, until=20)
    assert second.without(first).norms == {"b": HeldNorm(2.0, 8.0)}
    both = first.with_newer(second)
    assert both.norm_limits == {"a": 1.0, "b": 2.0}
    assert both.until == 20
    assert not second.without(both)


def test_the_sentence_about_a_norm_names_its_optimizer_and_the_largest_number_there_is():
    held = Held(
        norms={"1": HeldNorm(1.5, 9.0), "": HeldNorm(1.0, 1e15), "adam": HeldNorm(2.0, 3.0)}
    )
    assert held.sentences() == [
        "gradient norm of state[1] kept below 1.5 (it was 9)",
        "gradient norm kept below 1 (it was 1e+15 or more)",
        'gradient norm of "adam" kept below 2 (it was 3)',
    ]


def test_the_limit_of_a_rate_from_the_start_of_the_run_never_lasts():
    ranges = HealthyRanges(held=Held(start_rates={"a": {"scale": 1.0}}, until=40))
    first = ranges.held
    assert first
    assert (
        first.with_newer(Held(start_rates={"a": {"scale": 0.25}})).start_rates == first.start_rates
    )
    assert ranges.release_start_rates(40) == {}, "the trouble is still to come"
    assert ranges.release_start_rates(100) == {"a": {"scale": 1.0}}
    assert ranges.release_start_rates(200) == {}
    assert not ranges.held


def test_frozen_steps_stay_with_what_else_is_held():
    held = Held(numbers={"b": HeldNumber(NumberRange(0, 1, 1), 9.0)}, frozen_steps=(3, 5))
    assert [step for step in range(9) if held.freezes(step)] == [3, 4, 5]
    assert not any(Held(norms={"a": HeldNorm(1.0, 9.0)}).freezes(step) for step in range(9))
    assert Held(frozen_steps=(3, 5))
    assert held.with_newer(Held(until=9)).frozen_steps == (3, 5)
    assert held.without(Held()).frozen_steps == (3, 5)
    assert held.sentences()[-1] == "steps 3 to 5 are frozen: they change no weights"


def test_a_record_of_0_3_0_has_its_frozen_steps():
    saved = {**asdict(Held(until=9)), "withheld": [3, 5]}
    del saved["frozen_steps"]
    read = TypeAdapter(Held).validate_json(json.dumps(saved), strict=True)
    assert read == Held(frozen_steps=(3, 5), until=9)


FLOATS = st.floats(-1e6, 1e6)
RANGES = st.builds(NumberRange, FLOATS, FLOATS, FLOATS)


@given(st.dictionaries(st.text(max_size=5), RANGES, max_size=3), st.integers(0, 99))
def test_ranges_and_holds_are_saved_exactly(seen, until):
    ranges = HealthyRanges()
    ranges.learn({"a": constant(0.1)}, seen, {})
    ranges.learn({"a": constant(0.2)}, seen, {})
    numbers = {name: HeldNumber(each, each.high) for name, each in seen.items()}
    norms = {"a": HeldNorm(0.1, 3.0)}
    frozen = (until, until + 9) if until % 2 else None
    ranges.held = Held(numbers=numbers, norms=norms, frozen_steps=frozen, until=until)
    text = json.dumps(asdict(ranges), allow_nan=False)
    assert TypeAdapter(HealthyRanges).validate_json(text, strict=True) == ranges


def test_what_was_learnt_after_the_better_weights_does_not_count():
    ranges = learnt(constant(0.05))
    at_better = ranges.values
    ranges.learn({}, {"optimizer.weight_decay": NumberRange(0.05, 100.0, 100.0)}, {"a": 4096.0})
    seen = {"optimizer.weight_decay": NumberRange(0.05, 100.0, 100.0)}
    assert not ranges.values.outside(seen, {"a": 4096.0})
    assert at_better.outside(seen, {}).numbers
    known = HealthyValues(norms={"a": 1.0})
    assert known.outside({}, {"a": 4096.0}).norm_limits == {"a": 1.0}
    assert not known.outside({}, {"a": 3.0, "b": 9.0}), "as usual, and unknown"


@given(st.floats(0.01, 1.0), st.integers(1, 6))
def test_a_schedule_with_constant_acceleration_stays_inside_for_any_number_of_intervals(
    acceleration: float, intervals: int
):
    at = [acceleration * n**2 for n in range(2 + intervals)]
    number = HealthyNumber(at[0], at[0], at[0]).extended(NumberRange(at[0], at[1], at[1]))
    assert number.bounds(intervals).high >= at[1 + intervals] * (1 - 1e-9)
    assert number.bounds(intervals).high == pytest.approx(at[1 + intervals])


def test_a_rate_has_no_room_above_its_range():
    rates = HealthyValues().with_checkpoint({"a": constant(0.1), "b": constant(0.2)}, {}, {})
    rates = rates.with_checkpoint({"a": constant(0.2), "b": constant(0.1)}, {}, {})
    assert rates.healthy_rate("a", 0.21) == 0.2
    assert rates.healthy_rate("b", 0.3) == 0.1, "the last healthy rate"
    assert rates.healthy_rate("b", 0.15) == 0.15
    assert rates.healthy_rate("c", 7.0) == 7.0


def test_a_rate_beyond_float32_counts_as_unknown_without_a_warning():
    engine = engine_of("default")
    engines = {"": engine.to_dict(engine.init())}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = {"": 1e300}
        after = limit_rates(engine, engines, None, rates, healthy=True, learnt=HealthyValues())
    assert (after.scales, after.limits) == ({"": 1.0}, {})


def test_the_threshold_of_a_step_is_the_limit_of_the_norm_where_that_is_lower():
    held = Held(norms={"model": HeldNorm(limit=2.0, reached=9.0)}, frozen_steps=(5, 6))

    def threshold(step: int, **changes: Any) -> float:
        (found,) = held.with_thresholds(step, [record(**changes)])
        return found.threshold

    assert threshold(7) == 2.0
    assert threshold(7, threshold=1.0) == 1.0
    assert threshold(7, threshold=3.0) == 2.0
    assert threshold(5) == 0.0, "a frozen step has no limit"
    assert threshold(7, engine="other") == 0.0
