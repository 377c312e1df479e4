"""Steps are read some dispatches later, each with its own batches."""

from types import SimpleNamespace
from typing import Any

from healcore.core.step_record import StepRecord, Why
from healcore.runtime.data import BatchId
from healcore.runtime.run.dispatch_queue import DispatchQueue, DispatchStart
from tests.healer.step_records import record


def dispatch_of(step: StepRecord) -> Any:
    """A dispatch of one step that the device has done."""
    return SimpleNamespace(read=lambda: [[step]], count=1, vote_requested=False)


def test_batches_of_an_undone_accumulation_belong_to_no_later_step():
    queue = DispatchQueue()

    # A micro-step accumulates a batch, and the accumulation is undone.
    micro_step = record(why=Why.NOT_DUE)
    queue.push(dispatch_of(micro_step), DispatchStart(0, (BatchId(0, 0),)))
    list(queue.read_all())
    queue.forget_accumulation()

    # The next update is of its own batch.
    queue.push(dispatch_of(record()), DispatchStart(0, (BatchId(0, 1),)))
    (update,) = queue.read_all()
    assert update.batches == (BatchId(0, 1),)
