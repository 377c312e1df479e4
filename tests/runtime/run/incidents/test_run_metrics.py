"""The learning rates in force."""

from typing import Any

import pytest

from healcore.events import Log
from healcore.runtime.driver import Engines
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.incidents.metrics import COUNTS, RunMetrics
from tests.healer.step_records import record
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run

STATE = {"step": 0, "lr": {"scale": 0.5}, "tally": dict.fromkeys(COUNTS, 0)}


class DriverWithRate(BareDriver):
    def engines(self) -> dict[str, dict[str, Any]]:
        return {"model": {"state": STATE}}

    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        return {"model": 0.1, "other": None}


@pytest.fixture
def metrics_of_run() -> RunMetrics:
    return RunMetrics(bare_run(RunLog(Log(None), silent=True), DriverWithRate()))


def test_the_rates_in_force_have_the_multiplier_of_the_engines(metrics_of_run):
    metrics_of_run.read()
    assert metrics_of_run.lr_scale == 0.5
    assert metrics_of_run.rates_in_force() == {"model": 0.05}
    metrics_of_run.add([record(lr_scale=0.5, lr=0.2, engine="model")])
    assert metrics_of_run.rates_in_force()["model"] == 0.1, "of the step, not of the next one"
