"""The phase of a loop decides what an early end may save."""

import pytest
import torch

import healcore
from healcore.errors import AlreadyCompleted
from healcore.runtime.run.progress import LoopPhase
from healcore.runtime.trainer_access import trainer_access_of
from tests.healer.run_directory import new_process
from tests.open_run import run_of


def opened(store=None):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    healer = healcore.Healer("default", state={"model": model, "sgd": optimizer}, store=store)
    return model, optimizer, healer


def train(model, optimizer, healer):
    loss = model(torch.ones(4, 2)).mean()
    healer.observe(loss)
    loss.backward()
    optimizer.step()


def test_a_step_is_counted_in_the_body_and_dealt_with_after_it():
    model, optimizer, healer = opened()
    with healer:
        loop = run_of(healer).loop
        state = loop.state
        assert state.phase is LoopPhase.BEFORE_STEP
        for _ in healer.batches([torch.ones(4, 2)] * 3):
            assert state.phase is LoopPhase.BEFORE_STEP
            train(model, optimizer, healer)
            loop.queue_dispatch()
            assert state.phase is LoopPhase.AFTER_STEP
            # Of a program: the state is saved after an exception.
            assert not state.has_unfinished_work
        assert state.phase is LoopPhase.BEFORE_STEP


def test_the_code_of_a_trainer_after_an_epoch_is_a_phase():
    model, optimizer, healer = opened()
    with healer:
        loop = run_of(healer).loop
        state = loop.state
        for step in healer.steps(2):
            train(model, optimizer, healer)
            if step == 0:
                trainer_access_of(healer).mark_step_unfinished()
                assert state.phase is LoopPhase.EPOCH_END
                assert state.has_unfinished_work
                loop.queue_dispatch()
                assert state.phase is LoopPhase.AFTER_STEP
                trainer_access_of(healer).mark_step_unfinished()
                assert state.phase is LoopPhase.AFTER_STEP, "a counted step is not forgotten"
        trainer_access_of(healer).mark_step_unfinished()
        assert state.phase is LoopPhase.EPOCH_END
        healer.after_step()
        assert state.phase is LoopPhase.BEFORE_STEP


def test_a_completed_run_stays_completed(tmp_path):
    torch.manual_seed(0)
    model, optimizer, healer = opened(tmp_path)
    with healer:
        for _ in healer.steps(2):
            train(model, optimizer, healer)
    new_process()
    torch.manual_seed(0)
    model, optimizer, healer = opened(tmp_path)
    with healer:
        state = run_of(healer).loop.state
        assert list(healer.steps(2)) == []
        healer.after_step()
        assert state.phase is LoopPhase.COMPLETED
        train(model, optimizer, healer)
        with pytest.raises(AlreadyCompleted):
            healer.after_step()
        assert state.phase is LoopPhase.COMPLETED
