"""Loops that evaluate, break off, make a new loader for every epoch, or have many alarms."""

from __future__ import annotations

import pytest

from healcore import Checkpoints, adapter_registry
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, train


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_bad_batch_now_and_then_does_not_keep_a_run_from_saving(framework, tmp_path):
    loop = loop_of(framework, Faults(always=range(3, 60, 6)), SKIPS)
    facts = train(loop, SKIPS, range(60), store=tmp_path)
    saved = [event["step"] for event in events(tmp_path, "save")]
    assert len(saved) >= 8, "an incident is open all the time"
    assert saved[-1] == 60, "and the last state is saved all the same"
    assert facts["step"] == 60


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


def test_a_new_loader_for_every_epoch(tmp_path):
    def run(stop_at):
        loop = loop_of("torch")
        with Healer(
            rules(), state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)
        ) as healer:
            for epoch in range(20):
                for number in healer.batches([epoch, epoch + 100]):
                    loop.step(healer, number)
                    if healer.step == stop_at:
                        raise RuntimeError("power")
            assert len(healer.store.steps()) < 20
            positions = healer.run.data.loaders.position()
            assert len(positions) == 8 + len({"count", "epoch"}), "of the last eight loaders"
        return loop.faults.order

    with pytest.raises(RuntimeError, match="power"):
        run(26)
    after = run(None)
    assert after == [n for epoch in range(12, 20) for n in (epoch, epoch + 100)][1:]


class TwoAlike:
    """Two ranks that have the same at every exchange."""

    rank, world = 0, 2

    def gather(self, item):
        return [item, item]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_several_ranks_try_the_loss_fn_at_the_first_step(framework, monkeypatch):
    loop, calls = loop_of(framework, policy=rules()), []

    def loss_fn(*arguments):
        calls.append(arguments)
        return 1.0

    driver = adapter_registry.find(framework, "driver")
    monkeypatch.setattr(driver, "ranks", lambda self: TwoAlike())
    train(loop, rules(), range(3), loss_fn=loss_fn)
    assert 1 <= len(calls) <= 2, "once, and once with the weights before the first step"
