"""After an exception, a `break` or a rollback exactly one step that counts uses each batch."""

import sys
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints, Cursor, Healer
from healcore.runtime.run.journal import Journal
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    EVERY_5,
    SKIPS,
    Faults,
    TorchLoop,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
    with_answers,
)

BATCHES = 7
FEW = settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def listed() -> Any:
    return list(range(BATCHES))


def shuffled() -> Any:
    """A new order in each epoch, drawn from torch's global generator when the epoch begins."""
    return StatefulDataLoader(listed(), batch_size=None, shuffle=True)


def plain() -> Any:
    """The same with a loader of torch, which records no position."""
    return DataLoader(listed(), batch_size=None, shuffle=True)


def changed_at_random(numbers: list[int]) -> float:
    return numbers[0] + torch.rand(()).item() / 2


def read_ahead(workers: int = 0) -> Any:
    """Accelerate reads a batch ahead, and its examples are changed before the step before."""
    plain = DataLoader(listed(), shuffle=True, num_workers=workers, collate_fn=changed_at_random)
    return Accelerator(cpu=True).prepare(plain)


class Accumulating(TorchLoop):
    """Dropout and batch statistics, and a step for each `window` batches."""

    def __init__(self, window: int, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self.window = window
        self.used: list[tuple[float, ...]] = []
        self.pending: list[float] = []
        self.model.append(torch.nn.BatchNorm1d(1))
        self.optimizer.add_param_group({"params": list(self.model[-1].parameters())})

    def micro_batch(self, healer: Healer, number: float) -> None:
        inputs, targets = map(torch.from_numpy, self.faults.batch(int(number)))
        loss = (self.model(inputs) * (1 + number % 1) - targets).square().mean() / self.window
        healer.observe(loss)
        loss.backward()
        self.pending.append(number)
        if len(self.pending) == self.window:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.used.append(tuple(self.pending))
            self.pending.clear()

    def everything(self) -> list[Any]:
        return [*self.weights(), *(b.numpy().copy() for b in self.model.buffers())]


def run(loop: Accumulating, data: Any, store: Any, *, raises_at: int | None = None) -> int:
    """Two epochs; the batch of that number, from 0, raises after its forward pass."""
    count = 0
    saves = Checkpoints(every=3)
    with Healer(with_answers(), state=loop.state, store=store, checkpoints=saves) as healer:
        for number in healer.steps(2 * BATCHES) if data is None else healer.batches(data, epochs=2):
            if count == raises_at:
                loop.model(torch.zeros(4, 4))  # dropout and batch statistics
                raise ZeroDivisionError
            loop.micro_batch(healer, float(number))
            count += 1
        return healer.step


@pytest.mark.slow
@pytest.mark.parametrize("data", [listed, shuffled, plain, read_ahead, type(None)])
@FEW
@given(window=st.integers(1, 3), at=st.integers(0, 2 * BATCHES - 1))
def test_a_run_started_again_after_an_exception_is_the_one_without(
    data, window, at, tmp_path_factory
):
    """To the bit, though the window may lie over the end of an epoch."""
    if data in (read_ahead, type(None)):  # exact within an epoch, where it saves within a window
        window = 1
    folder = tmp_path_factory.mktemp("run")
    whole = Accumulating(window)
    steps = run(whole, data(), folder / "whole")
    first = Accumulating(window)
    with pytest.raises(ZeroDivisionError):
        run(first, data(), folder / "broken", raises_at=at)
    again = Accumulating(window)
    assert run(again, data(), folder / "broken") == steps
    assert first.used + again.used == whole.used
    assert same(again.everything(), whole.everything())


def test_a_position_of_workers_continues_without_workers():
    first, second = Cursor(read_ahead(workers=1)), Cursor(read_ahead())
    first.next()
    assert not second.seek(first.position())
    assert int(second.next()[0]) == int(first.next()[0])


@pytest.mark.parametrize(("bad", "named"), [(3, False), (3, True), (5, False)])
def test_a_rollback_after_a_break_goes_on_in_the_epoch_that_it_restores(bad, named):
    """The order for the last step before the `break` is read when the loop begins again."""
    loop = TorchLoop(Faults(once=[bad]))
    data = listed()
    with Healer(rules(cut=False), state=loop.state, checkpoints=Checkpoints(every=2)) as healer:
        for epoch in range(2):
            for number in healer.batches(data, epoch=epoch if named else None):
                loop.step(healer, number)
                if epoch == 0 and number == bad:
                    break
        assert healer.rollbacks == 1
    first, second = loop.faults.order[: bad + 1], loop.faults.order[bad + 1 :]
    assert first == list(range(bad + 1))
    assert second[-2 * BATCHES :][-BATCHES:] == data, "then the epoch that the loop asked for"
    assert second[:-BATCHES] == [n for n in range(second[0], BATCHES) if n != bad]


def test_a_rollback_to_before_the_loader_of_an_epoch_reads_the_earlier_epoch_again(capsys):
    """The loop makes a loader for each epoch. A rollback in epoch 1 leads into epoch 0."""
    loop = TorchLoop(Faults(once=[11]))
    with Healer(rules(cut=False), state=loop.state, checkpoints=Checkpoints(every=3)) as healer:
        for epoch in healer.epochs(2):
            for number in healer.batches([10 * epoch + i for i in range(8)], epoch=epoch):
                loop.step(healer, number)
            print(f"after pass {epoch}", file=sys.stderr)
    assert loop.faults.order[-12:] == [*range(3, 8), 10, *range(12, 18)]
    lines = capsys.readouterr().err
    returned = lines.index("healer.epochs yields epoch 0 again")
    assert lines.index("rolled back to checkpoint 3") < returned
    assert returned < lines.index("after pass 1"), "the code after the pass may print a wrong row"
    assert "rolled back to checkpoint 3, 1 batch skipped" in lines
    assert "healer.epochs yields epoch 0 again" in lines
    assert "not repeated" not in lines


def test_a_loop_over_range_with_a_new_loader_of_one_dataset_repeats_the_earlier_epoch(capsys):
    data = listed()

    def order_of(faults: Faults) -> list[int]:
        loop = TorchLoop(faults)
        with Healer(rules(cut=False), state=loop.state, checkpoints=Checkpoints(every=3)) as healer:
            for epoch in range(2):
                loader = DataLoader(data, batch_size=None, shuffle=True)  # type: ignore[arg-type]
                for number in healer.batches(loader, epoch=epoch):
                    loop.step(healer, number)
        return faults.order

    clean, hurt = Faults(), Faults()
    order_of(clean)
    at = BATCHES + 2
    hurt.once = {clean.order[at]}
    hurt.seen[clean.order[at]] = -clean.order[:at].count(clean.order[at])
    assert order_of(hurt)[-2 * BATCHES + 4 :] == clean.order[3:at] + clean.order[at + 1 :]
    assert "rolled back to checkpoint 3, 1 batch skipped" in capsys.readouterr().err


def test_a_loop_over_range_with_other_data_in_each_epoch_begins_this_epoch_again(capsys):
    """Such a loop cannot go back to the data of the earlier epoch, and the log says so."""
    loop = TorchLoop(Faults(once=[11]))
    with Healer(rules(cut=False), state=loop.state, checkpoints=Checkpoints(every=3)) as healer:
        for epoch in range(2):
            for number in healer.batches([10 * epoch + i for i in range(8)], epoch=epoch):
                loop.step(healer, number)
    assert loop.faults.order[-7:] == [10, *range(12, 18)]
    lines = capsys.readouterr().err
    assert "2 steps are repeated, 5 steps are not repeated" in lines
    assert "each epoch has a loader of its own" in lines


@pytest.mark.parametrize(
    ("framework", "data"),
    [
        pytest.param("torch", lambda: range(40), id="torch, range"),
        pytest.param(
            "torch",
            lambda: DataLoader(listed(), batch_size=None, shuffle=True),
            id="torch, samples of a DataLoader",
        ),
        pytest.param("torch", shuffled, id="torch, DataLoader"),
        pytest.param("torch", read_ahead, id="torch, Accelerate"),
        pytest.param("jax", lambda: range(40), marks=pytest.mark.slow, id="jax, range"),
    ],
)
def test_a_transient_fault_leaves_no_trace(framework, data, monkeypatch):
    # A rollback repeats the same batches.
    monkeypatch.setattr(Journal, "batches_of", lambda *_: [])
    policy = rules(cut=False)
    clean = loop_of(framework, policy=rules(cut=False))
    train(clean, policy, data(), epochs=5)
    hurt = loop_of(framework, policy=policy)
    bad = clean.faults.order[23]
    # Bad only this time, which may be in a later epoch.
    hurt.faults.once = {bad}
    hurt.faults.seen[bad] = -clean.faults.order[:23].count(bad)
    result = train(hurt, policy, data(), epochs=5)
    assert (result.rollbacks, result.step) == (1, len(clean.faults.order))
    assert len(hurt.faults.order) > len(clean.faults.order), "the run did not go back"
    assert same(hurt.weights(), clean.weights())


@BOTH_FRAMEWORKS
def test_a_loader_that_cannot_be_rewound_goes_on_forward_and_that_is_logged(
    framework, tmp_path, capsys
):
    loop = loop_of(framework, Faults(always=[23]), rules())
    result = train(loop, rules(), iter(range(40)), store=tmp_path)
    assert loop.faults.order == list(range(40)), "nothing twice, nothing left out"
    (rollback,) = events(tmp_path, "rollback")
    (warned,) = events(tmp_path, "note")
    assert "continues forward" in warned["why"], "before it is needed"
    assert "range_iterator" in rollback["outcome"]
    assert result.step == rollback["checkpoint"] + 15
    assert (rollback["steps_lost"], "steps_repeated" in rollback) == (10, False)
    lines = capsys.readouterr().err
    assert ", 10 steps are not repeated" in lines
    assert "data continues forward: range_iterator" in lines
    assert "; 10 of 40 steps were not repeated; " in lines.splitlines()[-1]
    (end,) = events(tmp_path, "end")
    (written,) = postmortems(tmp_path)
    assert end["steps_lost"] == written["steps_lost"] == written["rollbacks"][0]["steps_lost"] == 10


def test_a_generator_is_named_and_the_lost_steps_are_counted_over_a_restart(tmp_path, capsys):
    def stream():
        yield from range(40)

    breaks_off(loop_of("torch", Faults(always=[23])), rules(), stream(), at=33, store=tmp_path)
    loop = loop_of("torch", Faults(always=[23, 35]))
    train(loop, rules(), stream(), store=tmp_path)
    lost = [each["steps_lost"] for each in events(tmp_path, "rollback")]
    assert len(lost) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{sum(lost)} of 40 steps were not repeated" in last
    written = postmortems(tmp_path)[-1]
    assert [each["steps_lost"] for each in written["rollbacks"]] == lost
    assert written["steps_lost"] == sum(lost)


def test_a_rollback_says_how_many_steps_are_repeated(tmp_path, capsys):
    healers: list[Any] = []

    def before(healer: Any, number: int) -> None:
        healers.append(healer)

    loop = loop_of("torch", Faults(always=[23]))
    train(loop, rules(cut=False), range(40), store=tmp_path, before=before)
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["steps_repeated"], "steps_lost" in rollback) == (9, False)
    lines = capsys.readouterr().err
    assert "rolled back to checkpoint 15, 1 batch skipped, 9 steps are repeated\n" in lines
    assert "not repeated" not in lines
    (written,) = postmortems(tmp_path)
    (done,) = written["rollbacks"]
    assert (written["steps_lost"], done["steps_repeated"]) == (0, 9)
    report = healers[0].report()
    assert (report.steps_lost, report.rollbacks[0].repeated) == (0, 9)


def test_a_loop_that_asks_for_the_number_of_each_step_repeats_it_with_its_own_data(
    tmp_path, capsys
):
    loop = loop_of("torch", Faults(always=[23]))
    with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
        for number, _ in enumerate(healer.steps(40)):
            loop.step(healer, number)
    assert len(loop.faults.order) == 50
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["steps_repeated"] == 10
    lines = capsys.readouterr().err
    assert "10 steps are repeated" in lines
    assert "data continues forward: the loop does not read" in lines
    assert "not repeated" not in lines


def test_loaders_that_a_step_reads_together_are_rewound_together(tmp_path):
    loop = loop_of("torch", Faults(once=[23]))
    pairs = []
    with Healer(rules(), state=loop.state, checkpoints=Checkpoints(every=5)) as healer:
        inputs, targets = (healer.batches(range(at, at + 40), name=str(at)) for at in (0, 100))
        for pair in zip(inputs, targets, strict=True):
            pairs.append(pair)
            loop.step(healer, pair[0])
            list(healer.batches([0]))  # many loaders, each of one evaluation
    assert healer.rollbacks == 1
    assert {target - number for number, target in pairs} == {100}
    assert loop.faults.order.count(24) == 2
    assert healer.step < len(pairs)


@pytest.mark.slow
def test_the_policy_sets_how_many_batches_are_left_out(tmp_path):
    """No more than the epoch has: the next one is read from its first batch."""
    for count, batches in ((4, range(23, 28)), (1000, range(23, 40))):
        loop = loop_of("torch", Faults(once=[23]))
        store = tmp_path / str(count)
        train(loop, rules(skip_batches=count), range(40), store=store, epochs=2)
        (left_out,) = events(store, "note")
        assert left_out["batches"] == [[0, n] for n in batches]
        assert loop.faults.order[-40:] == list(range(40))
        assert loop.faults.order.count(24) == 2, "read on the way to the rollback, not after it"


def test_a_bad_batch_is_named_with_its_rows(tmp_path, caplog):
    data = DataLoader(range(40), batch_size=None, shuffle=True)  # type: ignore[arg-type]
    loop = loop_of("torch", Faults(always=[23]))
    with caplog.at_level("INFO", "healcore"):
        train(loop, SKIPS, data, store=tmp_path)
    (alarm,) = events(tmp_path, "alarm")
    assert alarm["rows"] == [[23]]
    named = f"epoch 0 batch {alarm['batches'][0][1]} (rows 23)"
    assert named in caplog.text
    assert named in " ".join(postmortems(tmp_path)[-1]["diagnosis"].split())
