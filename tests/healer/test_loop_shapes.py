"""Loops that evaluate, break off, make a new loader for every epoch, or have many alarms."""

from __future__ import annotations

import pytest

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, rules


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_an_evaluation_inside_the_loop(framework, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), rules())
    validation, seen = list(range(100, 103)), []
    with Healer(
        rules(), state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)
    ) as healer:
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
    with Healer(
        rules(), state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)
    ) as healer:
        for _epoch in range(3):
            for number in healer.batches(data):
                loop.step(healer, number)
                if number == 4:
                    break
        healer.after_step()
        assert healer.step == 15
    assert loop.faults.order == [0, 1, 2, 3, 4] * 3
