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
from healcore.events import read
from healcore.history import runs_of
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.faults_found import faults_found
from healcore.runtime.run.checkpoints.unread_steps import unread_from_text, unread_to_text
from healcore.runtime.run.compare.trained_step import ObservedBatch
from healcore.runtime.run.dispatch_queue import DispatchQueue, DispatchStart, ReadDispatch
from healcore.runtime.run.ending.shutdown import Shutdown
from tests.healer.run_directory import events
from tests.healer.simulated_kills import Crash, end_without_log
from tests.healer.step_records import record
from tests.healer.training_loops import SKIPS, Faults, TorchLoop, at, rules, train

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


def test_the_report_counts_an_unread_step_once_after_a_kill(tmp_path, monkeypatch):
    """The program saves in the body of a bad step. The kill comes after its incident is logged."""

    def kill(healer: Any) -> None:
        raise Crash

    class Saving(TorchLoop):
        def step(self, healer: Any, number: int) -> None:
            super().step(healer, number)
            if number == 6:
                healer.save()

    loop = Saving(Faults([6]))
    with monkeypatch.context() as patch:
        patch.setattr(Shutdown, "close", end_without_log)
        with pytest.raises(Crash):
            train(loop, SKIPS, range(20), store=tmp_path, save_every=50, before=at(10, kill))
    train(TorchLoop(Faults([6])), SKIPS, range(20), store=tmp_path, save_every=50)

    assert [each["onset"] for each in events(tmp_path, "incident")] == [6, 6]
    (history,) = runs_of(read(tmp_path / "healcore.events.jsonl").by_process())
    assert (history.counts().incidents, history.counts().skips) == (1, 1)
    assert [fault.first for fault in faults_found(history)] == [6]


@pytest.mark.parametrize(
    ("policy", "rolls_back"),
    [
        pytest.param(rules(), True, id="the same policy"),
        pytest.param(rules(recoveries=5), True, id="a policy with the same rule"),
        pytest.param(SKIPS, False, id="a policy without a rollback"),
        pytest.param(rules(mode="observe"), False, id="a policy that observes"),
        pytest.param("default", False, id="a policy that needs evidence"),
    ],
)
def test_the_policy_of_the_restart_decides_about_the_orders_of_unread_steps(
    policy, rolls_back, tmp_path
):
    """The bad step is the last one before a signal. The first policy orders a rollback for it."""
    loop = TorchLoop(Faults([6]))
    ask = at(6, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated):
        train(loop, rules(), range(20), store=tmp_path, before=ask)
    assert not events(tmp_path, "rollback")
    train(TorchLoop(Faults()), policy, range(20), store=tmp_path)
    assert bool(events(tmp_path, "rollback")) == rolls_back
    assert events(tmp_path, "end")[-1]["ending"] == "completed"
