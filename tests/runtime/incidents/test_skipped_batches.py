"""Which batches a rollback to earlier weights skips."""

from __future__ import annotations

import pytest

from healcore.runtime.data import BatchId
from healcore.runtime.incidents.delayed_reader import StepResult
from tests.runtime.incidents.test_step_lines import FINE, Run


@pytest.mark.parametrize(("back_to", "skipped"), [(None, [0, 1, 2, 3]), (4, [0, 1, 2, 3, 4, 5])])
def test_ids_of_an_earlier_loader_are_not_skipped_in_the_current_one(
    capsys: pytest.CaptureFixture[str], back_to: int | None, skipped: list[int]
):
    """Steps 0 to 5 have batches of one loader, and those from 6 on of another one."""
    monitor = Run(capsys).monitor
    for index in range(6):
        monitor.process(StepResult(index, [FINE], (BatchId(0, 100 + index),)))
    monitor.loader_from = start = 6
    if back_to is not None:  # the second loader begins again there
        monitor.on_rollback(back_to)
        start = back_to
    for index in range(start, 10):
        monitor.process(StepResult(index, [FINE], (BatchId(0, index - start),)))
    assert [each.index for each in monitor.batches_between(0, 9)] == skipped
