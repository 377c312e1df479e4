"""The learning rates in force."""

import pytest

from healcore.events import Log
from healcore.runtime.driver import Engines
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.incidents.metrics import RateLog
from tests.healer.step_records import record
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run


class DriverWithRate(BareDriver):
    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        return {"model": 0.1, "other": None}


@pytest.fixture
def rate_log() -> RateLog:
    return RateLog(bare_run(RunLog(Log(None), silent=True), DriverWithRate()))


def test_the_rates_in_force_have_the_multiplier_of_the_engines(rate_log):
    rate_log.read({"model": {"state": {"lr": {"scale": 0.5}}}})
    assert rate_log.lr_scale == 0.5
    assert rate_log.rates_in_force() == {"model": 0.05}
    rate_log.add(record(lr_scale=0.5, lr=0.2, engine="model"))
    assert rate_log.rates_in_force()["model"] == 0.1, "of the step, not of the next one"
