"""A completed run that is started again: its final state, no step, and the program goes on."""

from typing import Any

import pytest
import torch

from healcore import Healer
from healcore.errors import AlreadyCompleted
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import BOTH_FRAMEWORKS, EVERY_5, loop_of, rules, same

COUNT, EPOCHS = 6, 3


def over_batches(healer: Healer[Any]) -> Any:
    return healer.batches(range(COUNT), epochs=EPOCHS)


def over_epochs(healer: Healer[Any]) -> Any:
    loader = list(range(COUNT))
    for epoch in healer.epochs(EPOCHS):
        yield from healer.batches(loader, epoch=epoch)


def over_a_generator(healer: Healer[Any]) -> Any:
    return healer.batches(number for number in range(COUNT * EPOCHS))


def over_own_epochs(healer: Healer[Any]) -> Any:
    loader = list(range(COUNT))
    for _ in range(EPOCHS):
        yield from healer.batches(loader)


def over_endless_batches(healer: Healer[Any]) -> Any:
    for number in healer.batches(range(COUNT), epochs=None):
        yield number
        if healer.step >= COUNT * EPOCHS:
            break


def over_steps(healer: Healer[Any]) -> Any:
    return healer.steps(COUNT * EPOCHS)


LOOPS = [
    over_batches,
    over_epochs,
    over_a_generator,
    over_own_epochs,
    over_endless_batches,
    over_steps,
]


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("over", LOOPS, ids=lambda over: over.__name__)
def test_the_program_goes_on_with_the_final_state(over, framework, tmp_path, capsys):
    """Its evaluation reads its own loader, within the block and after it."""
    ends, evaluated = [], []
    for _ in range(2):
        new_process()
        capsys.readouterr()
        loop = loop_of(framework, policy=rules())
        steps = 0
        validation = [100, 101]
        with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            for number in over(healer):
                loop.step(healer, number)
                steps += 1
            loop.state = healer.state
            evaluated.append(list(healer.batches(validation)))
        ends.append((steps, healer.step, loop.weights()))
    assert [(steps, step) for steps, step, _ in ends] == [(18, 18), (0, 18)]
    assert same(ends[0][2], ends[1][2])
    assert evaluated == [validation] * 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "this run has completed at step 18: its final state is loaded" in lines[0]


@pytest.mark.parametrize("over", [over_batches, over_epochs, over_steps], ids=lambda x: x.__name__)
def test_what_the_program_draws_after_the_run_is_the_same(over, tmp_path):
    """Such as the dropout or the samples of an evaluation after the block."""
    drawn = []
    for _ in range(2):
        new_process()
        torch.manual_seed(0)
        loop = loop_of("torch", policy=rules())
        with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            for number in over(healer):
                torch.rand(1)
                loop.step(healer, number)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


@BOTH_FRAMEWORKS
def test_a_loop_that_counts_itself_ends_with_status_0_and_saves_nothing(framework, tmp_path):
    ends = []
    for _ in range(3):
        new_process()
        loop = loop_of(framework, policy=rules())
        try:
            with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
                for number in range(COUNT):
                    loop.step(healer, number)
                    healer.after_step()
        except AlreadyCompleted as error:
            ends.append((error.code, healer.step))
            assert "completed at step 6, and the loop trains on" in str(error)
    assert ends == [(0, COUNT)] * 2
    saves = [each["step"] for each in events(tmp_path, "save")]
    assert saves == [0, 5, COUNT]


def test_an_exception_in_the_evaluation_leaves_the_run_completed(tmp_path):
    for fails in (False, True, False):
        new_process()
        loop = loop_of("torch")
        try:
            with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
                for number in healer.batches(range(COUNT)):
                    loop.step(healer, number)
                if fails:
                    raise OSError("the metric server is gone")
        except OSError:
            assert fails
        assert healer.step == COUNT
    assert len(events(tmp_path, "save")) == 3
