"""Which changes of a learning-rate multiplier have an event."""

from pathlib import Path

import pytest

from healcore.core.decision import Action
from healcore.events import Log
from healcore.runtime.driver import Engines
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.incidents.rate_log import RateLog
from tests.healer.run_directory import events_of
from tests.healer.step_records import record
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run


class DriverWithRate(BareDriver):
    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        return {"model": 0.1, "other": None}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def rate_log(path) -> RateLog:
    return RateLog(bare_run(RunLog(Log(path), silent=True), DriverWithRate()))


def changes(path: Path) -> list[tuple[int, float, float]]:
    """Step, multiplier before and multiplier of each event."""
    return [(e["step"], e["lr_scale_before"], e["lr_scale"]) for e in events_of(path)]


def test_a_cut_and_its_end_have_an_event_and_the_ramp_between_has_none(rate_log, path):
    rate_log.add(3, record(lr_scale=0.5, action=Action.CUT_LR))
    for step, scale in enumerate([0.6, 0.8, 1.0, 1.0], 4):
        rate_log.add(step, record(lr_scale=scale))
    assert changes(path) == [(3, 1.0, 0.5), (6, 0.8, 1.0)]
    assert rate_log.lr_scale == 1.0


def test_the_rates_in_force_have_the_multiplier_of_the_engines(rate_log, path):
    rate_log.read({"model": {"state": {"lr": {"scale": 0.5}}}})
    assert rate_log.lr_scale == 0.5
    assert rate_log.rates_in_force() == {"model": 0.05}
    rate_log.add(1, record(lr_scale=0.5, lr=0.2, engine="model"))
    assert rate_log.rates_in_force()["model"] == 0.1, "of the step, not of the next one"
    assert not path.exists() or changes(path) == []
