"""What the schedule of the saves says where nothing was saved."""

from types import SimpleNamespace
from typing import Any

import pytest

from healcore.events import Log
from healcore.runtime.reporting.run_log import RunLog
from tests.runtime.run.bare_run import bare_run, schedule_of


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "no checkpoint yet (alarms delay the save); a restart begins at the first step"),
        (0, "no checkpoint since step 0 (alarms delay the save); a restart begins at step 0"),
    ],
)
def test_a_long_time_without_a_save_names_the_last_checkpoint(saved, said):
    problems: list[str] = []
    log: Any = RunLog(Log(None), silent=True)
    log.problem = lambda step, problem: problems.append(problem)
    driver: Any = SimpleNamespace(may_save=lambda patience: True)
    run = bare_run(log, driver)
    schedule = schedule_of(run, 10)
    schedule.last_saved = saved
    run.progress.step = 30

    schedule.due()

    assert problems == [said]
