"""A checkpoint holds the steps that the run has not acted on, and is saved without them if need be.

`tests/healer/test_interruptions.py` has the runs that continue with them.
"""

import math
import os
import signal
from typing import Any

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.core.step_record import SuspectGradient
from healcore.errors import Terminated
from healcore.runtime.data import BatchId
from healcore.runtime.run.checkpoints.unread_steps import unread_from_text, unread_to_text
from healcore.runtime.run.compare.trained_step import ObservedBatch
from healcore.runtime.run.dispatch_queue import DispatchQueue, DispatchStart, ReadDispatch
from tests.healer.step_records import record
from tests.healer.training_loops import SKIPS, TorchLoop, at, train

FINE = record()
BAD = record(
    cause=Cause.NONFINITE_GRAD,
    action=Action.ALERT,
    skip=True,
    z=math.inf,
    evidence=(SuspectGradient("weight", 3.0),),
)


def test_unread_steps_come_back_as_they_were():
    queue = DispatchQueue()
    batch = ObservedBatch({"x": np.arange(3)}, 0.5)
    queue.push(ReadDispatch([[FINE]], 1, True), DispatchStart(7, (BatchId(0, 7),)))
    queue.push(ReadDispatch([[FINE, BAD], [FINE]], 2), DispatchStart(8, (), (batch,)))
    text = unread_to_text(queue.read_ahead())
    assert unread_to_text(queue.read_ahead()) == text, "they stay queued"

    kept = unread_from_text(text, {8: [tuple(batch)]})
    assert [each.dispatch.steps for each in kept] == [[[FINE]], [[FINE, BAD], [FINE]]]
    assert [each.first.batches for each in kept] == [(BatchId(0, 7),), ()]
    assert [each.first.contents for each in kept] == [(), (batch,)]
    assert not any(each.dispatch.vote_requested or each.first.has_lost_contents for each in kept)

    again = DispatchQueue()
    again.resume(unread_from_text(text, {}))
    assert [each.index for each in again.read_all()] == [7, 8, 9]
    lost = [each.first.has_lost_contents for each in unread_from_text(text, {})]
    assert lost == [False, True], "a batch was too large for the checkpoint"


def test_a_failed_read_costs_no_save(tmp_path, monkeypatch):
    def fail(queue: DispatchQueue) -> Any:
        raise RuntimeError("the device is lost")

    ask = at(6, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(DispatchQueue, "read_ahead", fail)
    with pytest.raises(Terminated):
        train(TorchLoop(), SKIPS, range(10), store=tmp_path, before=ask)
    monkeypatch.undo()
    first: list[int] = []
    train(TorchLoop(), SKIPS, range(10), store=tmp_path, before=lambda _, n: first.append(n))
    assert first[0] == 7
