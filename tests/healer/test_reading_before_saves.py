"""All steps are read before a save, so that a checkpoint has their counts, and no order is lost."""

import os
import signal
from typing import Any

import pytest

from healcore.errors import Terminated
from healcore.events import read
from healcore.history import runs_of
from healcore.runtime.reporting.diagnosis import faults_found
from tests.healer.run_directory import events
from tests.healer.simulated_kills import Crash, die_at_the_end
from tests.healer.training_loops import SKIPS, Faults, TorchLoop, at, rules, train


class Saving(TorchLoop):
    """Saves in the body of the bad step."""

    def step(self, healer: Any, number: int) -> None:
        super().step(healer, number)
        if number == 6:
            healer.save()


def test_a_step_counts_once_if_the_program_saves_in_its_body_and_is_killed(tmp_path, monkeypatch):
    def kill(healer: Any) -> None:
        raise Crash

    loop = Saving(Faults([6]))
    with monkeypatch.context() as patch:
        die_at_the_end(patch)
        with pytest.raises(Crash):
            train(loop, SKIPS, range(20), store=tmp_path, save_every=50, before=at(10, kill))
    train(TorchLoop(Faults([6])), SKIPS, range(20), store=tmp_path, save_every=50)

    assert [each["step"] for each in events(tmp_path, "alarm")] == [6]
    (history,) = runs_of(read(tmp_path / "healcore.events.jsonl").by_process())
    assert (history.counts().incidents, history.counts().skips) == (1, 1)
    assert [event.step for event in faults_found(history) if event.kind == "alarm"] == [6]


def test_an_order_is_carried_out_after_a_save_in_the_body_of_its_step(tmp_path):
    train(Saving(Faults([6])), rules(), range(20), store=tmp_path)
    assert [each["onset"] for each in events(tmp_path, "rollback")] == [6]
    assert events(tmp_path, "end")[-1]["ending"] == "completed"


def test_an_order_of_the_last_step_is_carried_out_before_a_signal_ends_the_run(tmp_path):
    loop = TorchLoop(Faults([6]))
    ask = at(6, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated):
        train(loop, rules(), range(20), store=tmp_path, before=ask)
    assert [each["onset"] for each in events(tmp_path, "rollback")] == [6]
    first: list[int] = []
    train(
        TorchLoop(),
        rules(),
        range(20),
        store=tmp_path,
        before=lambda _, number: first.append(number),
    )
    assert first[0] == events(tmp_path, "rollback")[0]["checkpoint"]
    assert events(tmp_path, "end")[-1]["ending"] == "completed"
