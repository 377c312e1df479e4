"""Which learning rate a line calls the rate before."""

from typing import Any

import pytest

from healcore.core.step_record import StepRecord
from healcore.runtime.run.incidents.rate_log import JUMP_STEPS, RateLog
from healcore.runtime.run.monitor_state import MonitorState
from tests.healer.step_records import record


def with_rate(rate: float | None) -> StepRecord:
    return record()._replace(lr=rate)


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
    unused: Any = None
    log = RateLog(unused, unused, state=MonitorState(), observes=False)
    for step, rate in enumerate(rates):
        log.add(step, with_rate(rate))
    assert log.rate_before(len(rates) - 1, with_rate(rates[-1])) == before
