"""The program's own epochs after a rollback, in loops over `Healer.epochs` and in others."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Checkpoints, Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, JaxLoop, TorchLoop, loop_of, rules, same

EPOCHS, BATCHES = 4, 7
POLICY = rules(cut=False)
BAD_EPOCH, BAD_BATCH = 2, 1
"""The first batch of step 15 is bad, and the checkpoint before it is of step 10, in epoch 1."""


class Shrinking(TorchLoop):
    """The program changes the weights after each epoch, as a scheduler or a pruning does."""

    def after_epoch(self) -> None:
        with torch.no_grad():
            next(self.model.parameters()).mul_(0.9)
        torch.rand(3)


def numbers(epoch: int) -> Any:
    """The batches of an epoch, which no other epoch has."""
    return [epoch * BATCHES + index for index in range(BATCHES)]


def shuffled() -> Any:
    """A new order in each epoch, drawn from torch's global generator when the epoch begins."""
    data: Any = range(BATCHES)
    return DataLoader(data, batch_size=None, shuffle=True)


def plain_run(batches: Callable[[int], Iterable[int]], bad: tuple[int, int]) -> Shrinking:
    """The run without healcore in which the bad batch is left out."""
    loop = Shrinking()
    for epoch in range(EPOCHS):
        for index, number in enumerate(batches(epoch)):
            if (epoch, index) != bad:
                loop.step(None, number)
        loop.after_epoch()
    return loop


class Poisoned(Shrinking):
    """The first pass over one batch of one epoch gives a loss of NaN."""

    epoch = index = 0
    used = False

    def step(self, healer: Healer | None, number: Any) -> None:
        bad = (self.epoch, self.index) == (BAD_EPOCH, BAD_BATCH)
        self.faults = Faults(once=[int(number)] if bad and not self.used else [])
        self.used |= bad
        super().step(healer, number)


def healed_run(
    batches: Callable[[int], Any], store: Any = None, *, named: bool = True
) -> tuple[Poisoned, list[tuple[int, int]], int]:
    """A run in a loop over `epochs`. Returns the loop, its places and the number of rollbacks."""
    loop = Poisoned()
    places = []
    with Healer(POLICY, state=loop.state, store=store, checkpoints=Checkpoints(every=5)) as healer:
        for epoch in healer.epochs(EPOCHS):
            kwargs: Any = {"epoch": epoch} if named else {}
            for number in healer.batches(batches(epoch), **kwargs):
                assert healer.epoch == epoch
                loop.epoch, loop.index = epoch, healer.batch_index
                places.append((epoch, healer.batch_index))
                loop.step(healer, number)
            assert healer.epoch <= epoch
            loop.after_epoch()
        return loop, places, healer.rollbacks


@pytest.mark.parametrize("named", [True, False], ids=["named", "counted"])
def test_the_loop_over_epochs_goes_back(named, tmp_path):
    """Weights, order of the data, random numbers and the program's own changes are exact."""
    loader, again = shuffled(), shuffled()
    plain = plain_run(lambda _: again, (BAD_EPOCH, BAD_BATCH))
    loop, places, rollbacks = healed_run(lambda _: loader, tmp_path, named=named)
    assert rollbacks == 1
    bad = places.index((BAD_EPOCH, BAD_BATCH))
    first = next(i for i in range(bad + 1, len(places)) if places[i] < places[i - 1])
    assert places[first][0] == BAD_EPOCH - 1
    every = [(e, i) for e in range(EPOCHS) for i in range(BATCHES)]
    expected = [each for each in every if each >= places[first] and each != (BAD_EPOCH, BAD_BATCH)]
    assert places[first:] == expected
    assert same(loop.weights(), plain.weights())


def test_a_loader_for_each_epoch_loses_nothing(tmp_path):
    def made(epoch: int) -> Any:
        return DataLoader(numbers(epoch), batch_size=None, shuffle=True)

    plain = plain_run(made, (BAD_EPOCH, BAD_BATCH))
    loop, _, rollbacks = healed_run(made, tmp_path)
    assert rollbacks == 1
    (rollback,) = [each for each in events(tmp_path) if each["kind"] == "rollback"]
    assert "steps_lost" not in rollback
    assert same(loop.weights(), plain.weights())


class Broken(Exception):
    """Ends a process in the middle of an epoch."""


@pytest.mark.parametrize("broken_at", [(1, 4), (2, 0)])
def test_a_loader_for_each_epoch_continues_after_a_restart_and_a_rollback(broken_at, tmp_path):
    """Loaders of epochs before the restart are not made again, so no new loader is one of them."""

    def made(epoch: int) -> Any:
        return DataLoader(numbers(epoch), batch_size=None, shuffle=True)

    def run_once(breaks: bool) -> tuple[Poisoned, list[tuple[int, int]], int]:
        loop = Poisoned()
        places = []
        with Healer(
            POLICY, state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)
        ) as healer:
            for epoch in healer.epochs(EPOCHS):
                for number in healer.batches(made(epoch), epoch=epoch):
                    loop.epoch, loop.index = epoch, healer.batch_index
                    if breaks and (epoch, loop.index) == broken_at:
                        raise Broken
                    places.append((epoch, loop.index))
                    loop.step(healer, number)
                loop.after_epoch()
            return loop, places, healer.rollbacks

    with suppress(Broken):
        run_once(breaks=True)
    plain = plain_run(made, (BAD_EPOCH, BAD_BATCH))
    loop, places, rollbacks = run_once(breaks=False)
    assert rollbacks == 1
    for epoch in range(BAD_EPOCH, EPOCHS):
        assert (epoch, 0) in places
    assert places[-1] == (EPOCHS - 1, BATCHES - 1)
    assert same(loop.weights(), plain.weights())


@pytest.mark.parametrize("named", [True, False], ids=["named", "counted"])
def test_a_pass_never_has_more_batches_than_its_loader(named, tmp_path):
    """A rollback within an epoch begins the pass again at the batch of the checkpoint.

    Programs count with `enumerate`, and divide by what is left of `len(loader)`.
    """
    bad = 2, 5  # step 19; the checkpoint before it is of step 15, the second batch of this epoch
    loader, again = shuffled(), shuffled()
    plain = plain_run(lambda _: again, bad)
    loop = Shrinking()
    counted = []
    spoilt = False
    with Healer(POLICY, state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)) as run:
        for epoch in run.epochs(EPOCHS):
            kwargs: Any = {"epoch": epoch} if named else {}
            for index, number in enumerate(run.batches(loader, **kwargs)):
                assert index < len(loader)
                is_bad = (epoch, run.batch_index) == bad and not spoilt
                loop.faults = Faults(once=[int(number)] if is_bad else [])
                spoilt |= is_bad
                counted.append((epoch, run.batch_index, index))
                loop.step(run, number)
            loop.after_epoch()
        assert run.rollbacks == 1
    first = next(i for i in range(1, len(counted)) if counted[i] < counted[i - 1])
    assert counted[first] == (2, 1, 0)
    assert same(loop.weights(), plain.weights())


def test_a_loop_over_range_is_told(tmp_path, caplog):
    loop = Poisoned()
    loader = shuffled()
    with Healer(POLICY, state=loop.state, checkpoints=Checkpoints(every=5)) as healer:
        differs = 0
        for epoch in range(EPOCHS):
            for number in healer.batches(loader):
                loop.epoch, loop.index = healer.epoch, healer.batch_index
                differs += epoch != healer.epoch
                loop.step(healer, number)
    assert differs == BATCHES - 10 % BATCHES
    assert caplog.text.count("write `for epoch in healer.epochs(n)`") == 1
    assert (
        "batches of epoch 1 are repeated, but the program's own `epoch` is still 2" in caplog.text
    )


def test_a_restarted_loop_over_range_is_told_what_its_passes_do(tmp_path, caplog):
    """No epoch is trained twice, but the program's code after each pass runs again."""
    caplog.set_level(logging.INFO, "healcore")
    loader = list(range(BATCHES))
    passes = []
    for start in range(2):
        loop = TorchLoop()
        checkpoints = Checkpoints(every=BATCHES)
        with (
            suppress(RuntimeError),
            Healer(state=loop.state, store=tmp_path, checkpoints=checkpoints) as healer,
        ):
            for _ in range(EPOCHS):
                passes.append(0)
                for number in healer.batches(loader):
                    if start == 0 and healer.step == 2 * BATCHES + 3:
                        raise RuntimeError("power")
                    passes[-1] += 1
                    loop.step(healer, number)
    assert passes[:3] == [BATCHES, BATCHES, 3]
    assert passes[3:] == [0, 0, BATCHES - 3, *[BATCHES] * (EPOCHS - 3)]
    (line,) = [each for each in caplog.messages if "the run resumes in epoch 2" in each]
    assert "a pass over an earlier epoch yields no batch, and no epoch is trained twice" in line
    assert "code after such a pass, for example an evaluation, runs again" in line


def test_the_epoch_of_a_single_pass_needs_no_line(caplog):
    loop = Poisoned()
    loader = shuffled()
    places = []
    with Healer(POLICY, state=loop.state, checkpoints=Checkpoints(every=5)) as healer:
        for number in healer.batches(loader, epochs=EPOCHS):
            loop.epoch, loop.index = healer.epoch, healer.batch_index
            places.append((healer.epoch, healer.batch_index))
            loop.step(healer, number)
    assert (1, 3) in places[-20:]
    assert "healer.epochs" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TorchLoop, JaxLoop])
def test_epoch_and_batch_index_continue_after_a_restart(kind, tmp_path):
    data = list(range(BATCHES))
    for begins in (0, 10):
        loop = kind() if kind is TorchLoop else JaxLoop(policy="default")
        with (
            suppress(RuntimeError),
            Healer(state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)) as healer,
        ):
            assert (healer.epoch, healer.batch_index) == divmod(begins, BATCHES)
            for number in healer.batches(data, epochs=EPOCHS):
                step = healer.step
                assert (healer.epoch, healer.batch_index) == divmod(step, BATCHES)
                if step == begins + 10:
                    raise RuntimeError("power")
                loop.step(healer, number)
                assert (healer.epoch, healer.batch_index) == divmod(step, BATCHES)


@pytest.mark.slow
def test_in_jax_the_loop_goes_back_with_the_state_of_the_rollback(tmp_path):
    """The program holds the state that `update` has returned, and goes on from it."""
    data = list(range(BATCHES))
    places = []

    def run(store: Any, *, healed: bool) -> JaxLoop:
        loop = JaxLoop(policy=POLICY if healed else None)
        poisoned = False
        if not healed:
            for epoch in range(EPOCHS):
                for index, number in enumerate(data):
                    if (epoch, index) != (BAD_EPOCH, BAD_BATCH):
                        loop.step(None, number)
            return loop
        with Healer(
            POLICY, state=loop.state, store=store, checkpoints=Checkpoints(every=5)
        ) as healer:
            state = healer.state
            for epoch in healer.epochs(EPOCHS):
                for number in healer.batches(data, epoch=epoch):
                    bad = (epoch, number) == (BAD_EPOCH, BAD_BATCH) and not poisoned
                    poisoned |= bad
                    batch = Faults(always=[number] if bad else []).batch(number)
                    places.append((epoch, number))
                    state = healer.update(loop.compiled_step(state, *batch))
            loop.state = healer.state
        return loop

    assert same(run(tmp_path, healed=True).weights(), run(None, healed=False).weights())
    assert places.count((BAD_EPOCH - 1, 3)) == 2


@pytest.mark.parametrize(
    ("bad_step", "evaluated"),
    [
        pytest.param(15, [0, 1, 1, 2, 3], id="earlier epoch"),
        pytest.param(19, [0, 1, 2, 3], id="earlier batch"),
        pytest.param(3, [0, 1, 2, 3], id="first batch of the run"),
    ],
)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_pass_that_a_rollback_has_ended_is_told_from_a_complete_one(
    framework, bad_step, evaluated, tmp_path
):
    """Neither the epoch nor the batch index tells them apart after each of these rollbacks."""
    numbers = list(range(EPOCHS * BATCHES))
    loop = loop_of(framework, Faults(once=[bad_step]), POLICY)
    last_batches = []
    epochs = []
    with Healer(
        POLICY, state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=3)
    ) as healer:
        for epoch in healer.epochs(EPOCHS):
            assert not healer.will_repeat_epoch
            index = -1
            batches = numbers[epoch * BATCHES : (epoch + 1) * BATCHES]
            for number in healer.batches(batches, epoch=epoch):
                assert not healer.will_repeat_epoch
                index = healer.batch_index
                loop.step(healer, number)
            if not healer.will_repeat_epoch:
                epochs.append(epoch)
                last_batches.append(index)
        assert healer.rollbacks == 1
    assert epochs == evaluated
    assert last_batches == [BATCHES - 1] * len(epochs)


def test_an_exception_in_the_code_after_the_pass_changes_no_checkpoint(tmp_path):
    """That code runs with the restored weights, and changes them. The restart does not have it."""
    loader = shuffled()
    again = shuffled()
    plain = plain_run(lambda _: again, (BAD_EPOCH, BAD_BATCH))
    for fails in (True, False):
        loop = Poisoned()
        places = []
        loop.used = not fails
        checkpoints = Checkpoints(every=5)
        try:
            with Healer(
                POLICY, state=loop.state, store=tmp_path, checkpoints=checkpoints
            ) as healer:
                for epoch in healer.epochs(EPOCHS):
                    for number in healer.batches(loader, epoch=epoch):
                        loop.epoch, loop.index = epoch, healer.batch_index
                        places.append((epoch, healer.batch_index))
                        loop.step(healer, number)
                    loop.after_epoch()
                    if healer.epoch < epoch:
                        healer.save()
                        raise RuntimeError("disk quota")
        except RuntimeError:
            assert fails
    assert places[0] == (BAD_EPOCH - 1, 3)
    assert same(loop.weights(), plain.weights())


def test_an_evaluation_after_the_pass_is_read_whole_before_the_loop_goes_back(tmp_path):
    loop = Poisoned()
    loader = shuffled()
    evaluation = list(range(3))
    counts = []
    with Healer(POLICY, state=loop.state, checkpoints=Checkpoints(every=5)) as healer:
        for epoch in healer.epochs(EPOCHS):
            for number in healer.batches(loader, epoch=epoch):
                loop.epoch, loop.index = epoch, healer.batch_index
                loop.step(healer, number)
            counts.append(len(list(healer.batches(evaluation))))
    assert healer.rollbacks == 1
    assert counts == [3] * (EPOCHS + 2)


def test_an_exhausted_generator_has_a_warning_and_ends_no_run(tmp_path, caplog):
    loop = loop_of("torch")
    stream = (number for number in range(BATCHES))
    lengths = []
    with Healer(POLICY, state=loop.state, store=tmp_path) as healer:
        for epoch in healer.epochs(3):
            lengths.append(0)
            for number in healer.batches(stream, epoch=epoch):
                loop.step(healer, number)
                lengths[-1] += 1
    assert lengths == [BATCHES, 0, 0]
    (line,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "epoch 1 has no batch" in line
    assert "healer.batches(lambda: stream(seed=healer.epoch), epoch=epoch)" in line
