"""What is learnt as healthy, and what counts as outside of it."""

import copy
import warnings
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.policy import engine_of
from healcore.runtime.driver import NumberRange
from healcore.runtime.run.engine_states import limit_rates
from healcore.runtime.run.envelope import Held
from healcore.runtime.run.healthy_ranges import HealthyValues


def constant(value: float) -> NumberRange:
    return NumberRange(value, value, value)


NAME = "optimizer.weight_decay"


def learnt(*seen: NumberRange) -> HealthyValues:
    """The values after one healthy checkpoint for each of `seen`."""
    values = HealthyValues()
    for each in seen:
        values.add_checkpoint({}, {NAME: each})
    return values


def numbers_outside(values: HealthyValues, seen: NumberRange) -> dict[str, Held]:
    return values.outside({NAME: seen}, [], 1.0).numbers


def test_any_change_of_a_number_that_never_changed_is_outside():
    values = learnt(constant(0.05), constant(0.05))
    assert numbers_outside(values, constant(0.05)) == {}
    (held,) = numbers_outside(values, NumberRange(0.05, 100.0, 0.05)).values()
    assert held == Held(constant(0.05), 100.0), "although it is back now"
    (held,) = numbers_outside(values, NumberRange(0.0, 0.05, 0.05)).values()
    assert held.outside == 0.0


def test_the_range_has_all_values_of_healthy_steps_and_the_last_one_is_held():
    values = learnt(constant(0.9), NumberRange(0.8, 0.95, 0.9))
    assert numbers_outside(values, NumberRange(0.8, 0.95, 0.95)) == {}
    (held,) = numbers_outside(values, NumberRange(0.5, 0.95, 0.5)).values()
    assert held.bounds.last == 0.9


def test_a_number_that_was_never_seen_at_a_healthy_checkpoint_is_not_held():
    assert numbers_outside(HealthyValues(), constant(0.5)) == {}


@pytest.mark.parametrize("shape", ["linear", "cos"])
def test_a_schedule_of_momentum_is_inside_of_its_range(shape: Literal["linear", "cos"]):
    """At every step of OneCycleLR, from the second healthy checkpoint on."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 1000, anneal_strategy=shape)
    values = HealthyValues()
    low = 1.0
    high = 0.0
    outside = 0
    for step in range(1000):
        value = optimizer.param_groups[0]["momentum"]
        low = min(low, value)
        high = max(high, value)
        seen = NumberRange(low, high, value)
        if step % 100 == 0:
            values.add_checkpoint({}, {NAME: seen})
        elif step > 100:
            outside += bool(numbers_outside(values, seen))
        optimizer.step()
        schedule.step()
    assert outside == 0
    assert numbers_outside(values, NumberRange(low, 0.999, 0.999))


def test_what_was_learnt_after_the_better_weights_does_not_count():
    at_better = learnt(constant(0.05))
    wrong = NumberRange(0.05, 100.0, 100.0)
    later = copy.deepcopy(at_better)
    later.add_checkpoint({}, {NAME: wrong})
    assert not later.outside({NAME: wrong}, [], 1.0)
    assert at_better.outside({NAME: wrong}, [], 1.0).numbers
    known = HealthyValues(norms={"a": 1.0})
    assert known.outside({}, [{"a": 4096.0}], 1.0).norms == {"a": 1.0}
    assert not known.outside({}, [{"a": 3.0, "b": 9.0}], 1.0), "as usual, and unknown"


@given(st.floats(0.01, 1.0), st.integers(1, 6))
def test_a_schedule_with_constant_acceleration_stays_inside_for_any_number_of_intervals(
    acceleration: float, intervals: int
):
    at = [acceleration * n**2 for n in range(2 + intervals)]
    number = learnt(constant(at[0]), NumberRange(at[0], at[1], at[1])).numbers[NAME]
    assert number.bounds(intervals).high >= at[1 + intervals] * (1 - 1e-9)
    assert number.bounds(intervals).high == pytest.approx(at[1 + intervals])


def test_a_rate_has_no_room_above_its_range():
    rates = HealthyValues()
    rates.add_checkpoint({"a": 0.1, "b": 0.2}, {})
    rates.add_checkpoint({"a": 0.2, "b": 0.1}, {})
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
        after = limit_rates(engine, engines, {}, rates, healthy=True, learnt=HealthyValues())
    assert (after.scales, after.limits) == ({"": 1.0}, {})
