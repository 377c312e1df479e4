"""A Healer whose steps are never polled logs a warning, and does not grow."""

from __future__ import annotations

import gc
import logging

import pytest
from torch.optim import AdamW

from healcore.runtime.healer import Healer
from healcore.torch.driver.pending_step import MOST, PendingEntry
from tests.healer.torch.runs import Run


def entries() -> int:
    gc.collect()
    return sum(isinstance(each, PendingEntry) for each in gc.get_objects())


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "after_step()" in r.getMessage()]


def test_steps_that_nobody_polls_are_logged_once_and_not_kept(caplog):
    run, before = Run(AdamW), entries()
    with caplog.at_level(logging.INFO), Healer("default", state=run.state) as healer:
        for i in range(99):
            healer.observe(1.0)
            run.step(i)
        assert not lines(caplog)
        for i in range(500):
            healer.observe(1.0)
            run.step(i)
        assert entries() - before <= 3 * MOST
    (line,) = lines(caplog)
    assert "healer.batches(loader)" in line


def test_many_steps_to_a_batch_are_fine(caplog):
    run = Run(AdamW)
    with caplog.at_level(logging.INFO), Healer("default", state=run.state) as healer:
        for _ in healer.batches(range(3)):
            for i in range(300):
                healer.observe(float("nan") if i == 100 else 1.0)
                run.step(i)
    assert not lines(caplog)
    assert healer.step == 3


def test_an_alarm_among_many_steps_is_not_lost():
    run = Run(AdamW)
    with Healer("default", state=run.state) as healer:
        for _ in healer.batches(range(1)):
            for i in range(300):
                healer.observe(float("nan") if i == 100 else 1.0)
                run.step(i)
            handle = healer.driver.poll_step()
            assert handle is not None
            (records,) = handle.steps()
    assert sum(bool(int(each.cause)) for each in records) == 1
    assert records[-1].step == 300
