"""Which learning rate a line calls the rate before."""

import pytest

from healcore.core.step_record import StepRecord
from healcore.runtime.run.rate_jumps import JUMP_STEPS, RateJumps
from tests.healer.step_records import record


def with_rate(rate: float | None, **fields: float) -> StepRecord:
    return record()._replace(lr=rate, **fields)


@pytest.mark.parametrize(
    ("rates", "before"),
    [
        ([0.003, 0.003, 0.3, 0.3], 0.003),
        ([0.003, 0.3, *[0.3] * JUMP_STEPS], 0.003),
        ([0.003, 0.3, *[0.3] * (JUMP_STEPS + 1)], None),
        ([0.003, 0.3, 0.003], None),
        ([0.001, 0.002, 0.003, 0.004], None),
        ([0.0, 0.001], None),
        ([None, 0.3, None], None),
    ],
)
def test_a_jump_has_the_rate_before_it(rates, before):
    jumps = RateJumps()
    for step, rate in enumerate(rates):
        jumps.add(step, with_rate(rate))
    assert jumps.rate_before(len(rates) - 1, with_rate(rates[-1])) == before


def test_a_rate_that_is_limited_has_not_jumped():
    jumps = RateJumps()
    jumps.add(0, with_rate(0.003))
    limited = with_rate(0.3, lr_scale=0.01)
    jumps.add(1, limited)
    assert jumps.rate_before(1, limited) is None
