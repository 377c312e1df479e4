"""The phase of a loop decides what an early end may save."""

import torch

import healcore
from healcore.runtime.run.progress import LoopPhase
from healcore.runtime.trainer_access import trainer_access_of
from tests.open_run import run_of


def test_the_code_of_a_trainer_after_an_epoch_is_a_phase():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with healcore.Healer("default", state={"model": model, "sgd": optimizer}) as healer:
        loop = run_of(healer).loop
        state = loop.state
        for step in healer.steps(2):
            loss = model(torch.ones(4, 2)).mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
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
