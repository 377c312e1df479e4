"""Loops of epochs and steps: killed and started again, with an evaluation, left by `break`."""

from __future__ import annotations

import random

import pytest

from healcore import Checkpoints, Healer
from healcore.errors import IncompleteRun
from tests.healer.run_directory import events
from tests.healer.test_crashes import Crash, end_without_log
from tests.healer.training_loops import EVERY_5, Faults, loop_of, rules

LENGTH = 10


BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def start(framework, store, program, kill_at=None):
    """Runs `program(healer, step)` in a new Healer; returns the batches. A kill saves nothing."""
    loop, taken = loop_of(framework, policy=rules()), []
    healer = Healer(rules(), state=loop.state, store=store, checkpoints=Checkpoints(every=4))

    def step(healer, batch):
        loop.step(healer, batch)
        taken.append(batch)
        if healer.step == kill_at:
            raise Crash

    healer.__enter__()
    try:
        program(healer, step)
    except Crash as crash:
        end_without_log(healer._run, crash)
    else:
        healer.__exit__(None, None, None)
    return taken


@BOTH
@pytest.mark.parametrize(("kill_at", "expected"), [(17, [1, 2]), (22, [1, 2])])
@pytest.mark.parametrize("new_loaders", [False, True])
def test_epochs_continue_after_a_kill(framework, kill_at, expected, new_loaders, tmp_path):
    """A checkpoint at the end of an epoch resumes there, because code after the epoch follows."""
    loader, epochs, ended = list(range(LENGTH)), [], []

    def program(healer, step):
        for epoch in healer.epochs(3):
            epochs.append(epoch)
            batches = healer.batches(list(loader) if new_loaders else loader, epoch=epoch)
            assert len(batches) == LENGTH
            for batch in batches:
                step(healer, batch)
            ended.append((healer.step, random.random()))  # a scheduler's step, an evaluation

    random.seed(0)
    start(framework, tmp_path / "undisturbed", program)
    undisturbed = ended[1:]
    random.seed(0)
    start(framework, tmp_path / "killed", program, kill_at)
    epochs.clear()
    ended.clear()
    taken = start(framework, tmp_path / "killed", program)
    assert epochs == expected
    assert ended == undisturbed
    assert taken == [i % LENGTH for i in range(kill_at // 4 * 4, 3 * LENGTH)]


@BOTH
def test_steps_continue_after_a_kill_and_end_at_the_total(framework, tmp_path):
    numbers = []

    def program(healer, step):
        for number in healer.steps(30):
            numbers.append(number)
            assert healer.step == number
            step(healer, number)
            assert healer.step == number + 1

    start(framework, tmp_path, program, 17)
    numbers.clear()
    start(framework, tmp_path, program)
    assert numbers == [*range(16, 30)]


@pytest.mark.parametrize(("passes", "completed"), [(2, True), (1, False)])
def test_a_kill_after_the_last_step_of_a_loop_of_epochs(passes, completed, tmp_path):
    """The next start trains nothing, and is complete if it repeats all passes from epoch 0 on."""
    loader = list(range(12))  # a checkpoint at the last step of each epoch

    def program(healer, step, passes=passes):
        for _ in range(passes):
            for batch in healer.batches(loader):
                step(healer, batch)

    def killed(healer, step):
        program(healer, step, passes=2)
        raise Crash

    start("torch", tmp_path, killed)
    if completed:
        assert start("torch", tmp_path, program) == []
    else:
        with pytest.raises(IncompleteRun):
            start("torch", tmp_path, program)


@BOTH
def test_an_evaluation_inside_the_loop(framework, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), rules())
    validation, seen = list(range(100, 103)), []
    with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
        for number in healer.batches(range(40)):
            loop.step(healer, number)
            if number % 10 == 0:
                seen += list(healer.batches(validation))
        assert healer.step == 39
        assert healer.rollbacks == 1
    assert events(tmp_path, "skipped_batches")[0]["batches"] == [[0, 23]]
    assert seen[:6] == validation * 2


def test_a_loop_that_breaks_off_starts_the_next_epoch_from_its_beginning(tmp_path):
    loop, data = loop_of("torch"), list(range(10))
    with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
        for _epoch in range(3):
            for number in healer.batches(data):
                loop.step(healer, number)
                if number == 4:
                    break
        healer.after_step()
        assert healer.step == 15
    assert loop.faults.order == [0, 1, 2, 3, 4] * 3
