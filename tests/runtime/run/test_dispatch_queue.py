"""Steps are read some dispatches later, each with its own batches."""

from types import SimpleNamespace
from typing import Any

from healcore.core.step_record import StepRecord, Why
from healcore.runtime.data import BatchId
from healcore.runtime.run.dispatch_queue import DispatchQueue, DispatchStart
from healcore.runtime.run.progress import RunProgress
from tests.healer.step_records import record


def dispatch_of(step: StepRecord) -> Any:
    """A dispatch of one step that the device has done."""
    return SimpleNamespace(read=lambda: [[step]], count=1, vote_requested=False)


def test_batches_of_an_undone_accumulation_belong_to_no_later_step():
    queue = DispatchQueue(RunProgress())

    # A micro-step accumulates a batch, and the accumulation is undone.
    micro_step = record(why=Why.NOT_DUE)
    queue.push(dispatch_of(micro_step), DispatchStart(0, (BatchId(0, 0),)))
    list(queue.read_all())
    queue.clear()

    # The next update is of its own batch.
    queue.push(dispatch_of(record()), DispatchStart(0, (BatchId(0, 1),)))
    (update,) = queue.read_all()
    assert update.batches == (BatchId(0, 1),)


def test_steps_that_were_looked_at_are_still_due_before_all_others():
    """A rollback that was not possible has read them, and their own orders are still open."""
    queue = DispatchQueue(RunProgress())
    for index in range(3):
        queue.push(dispatch_of(record()), DispatchStart(index, ()))
    assert queue.read_next().index == 0
    assert [each.index for each in queue.peek_all()] == [1, 2]
    queue.push(dispatch_of(record()), DispatchStart(3, ()))
    assert queue.has_due()
    assert [each.index for each in queue.read_all()] == [1, 2, 3]
