"""An exception within a step or a read: repeated, skipped, or trained when started again."""

import multiprocessing
import os
import signal
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback, heal_trainer
from tests.healer.run_directory import events, new_process
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.lightning import fits

OFTEN = Checkpoints(every=2)
QUICK = {"base_delay_s": 0.01, "max_delay_s": 0.02}


class Failing:
    """Raises at some of its calls, which count from 0."""

    def __init__(self, *at: int, error: Exception | None = None) -> None:
        self.at, self.calls = at, 0
        self.error = error or ConnectionResetError("the judge is gone")

    def __call__(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise self.error


def answers(folder: Path) -> list[str | None]:
    return [each.get("answer") for each in events(folder / "store", "fault")]


def train(folder: Path, accumulated: int, failing: Failing | None = None) -> Any:
    """Two epochs of 7 batches, so that the last window of an epoch may be a shorter one."""
    made: Any = small_runs.trainer(
        folder,
        cls=small_runs.Recording,
        num_train_epochs=2,
        gradient_accumulation_steps=accumulated,
    )
    made.model.layers.insert(1, torch.nn.Dropout(0.2))
    made.train_dataset = small_runs.Rows(7)
    made.asks = failing or bool
    heal_trainer(made, store=folder / "store", checkpoints=OFTEN, retry=QUICK).train()
    return made


@pytest.mark.parametrize("at", [(0,), (4, 5), (7,)])
def test_a_step_of_a_trainer_is_repeated_after_a_failure_in_the_network(at: Any, tmp_path: Path):
    """Gradients and random state are those before the step, in its second micro-batch too."""
    whole, again = train(tmp_path / "whole", 2), train(tmp_path / "failed", 2, Failing(*at))
    assert again.state.global_step == whole.state.global_step == 8
    assert answers(tmp_path / "failed") == ["retry"] * len(at)
    assert torch.equal(small_runs.weights(again), small_runs.weights(whole))
    assert small_runs.logged(again, "loss") == small_runs.logged(whole, "loss")


@pytest.mark.parametrize(("accumulated", "at"), [(3, 4), (3, 9), (2, 7)])
def test_each_batch_of_a_trainer_is_used_by_one_step(
    accumulated: int, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = train(tmp_path / "whole", accumulated)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "broken", accumulated, Failing(at, error=ZeroDivisionError()))
    again = train(tmp_path / "broken", accumulated)
    assert again.seen == whole.seen[at - at % 7 % accumulated :]
    assert torch.equal(small_runs.weights(again), small_runs.weights(whole))
    assert (again.state.global_step, again.state.epoch) == (whole.state.global_step, 2.0)
    assert small_runs.logged(again, "loss") == small_runs.logged(whole, "loss")
    if at == 4:  # the other windows begin where a checkpoint is
        assert "come again after a restart" in capsys.readouterr().err


def test_a_reward_function_is_asked_again(tmp_path: Path):
    found = []
    for at in ((), (0, 2)):
        folder = tmp_path / str(at)
        failing = Failing(*at)
        trainer = tiny.grpo(folder, max_steps=4, num_iterations=2)

        def reward(judge: Any = trainer.reward_funcs[0], asks: Any = failing, **given: Any) -> Any:
            asks()
            return judge(**given)

        trainer.reward_funcs[0] = reward
        heal_trainer(trainer, store=folder / "store", retry=QUICK).train()
        assert answers(folder) == ["retry"] * len(at)
        found.append((small_runs.logged(trainer, "loss"), small_runs.weights(trainer)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


class Module(fits.Regression):
    """Has dropout, and asks in each training step."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.Dropout(0.2))
        self.asks = asks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.asks()
        return loss


def fit(store: Path, loader: Any, asks: Any = bool, **options: Any) -> tuple[Module, Any]:
    def loaders() -> list[Any]:
        return [loader(fits.data(7), batch_size=8, shuffle=True, **options)]

    given: Any = {"max_epochs": 2, "accumulate_grad_batches": 3, "loaders": loaders}
    # The calls of `asks` are counted, so no comparison of weights may call the training step.
    callback = LightningHealingCallback(store=store, checkpoints=OFTEN, loss_fn=None)
    return fits.fit(callback, make=lambda: Module(asks), **given)


def killing(number: signal.Signals, at: int) -> Any:
    """Sends this process a signal at one of its calls."""
    calls = count()
    return lambda: next(calls) == at and os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "loader", "workers"),
    [(4, StatefulDataLoader, 0), (0, DataLoader, 0), (4, DataLoader, 0), (8, DataLoader, 1)],
)
def test_each_batch_of_a_fit_is_used_by_one_step(
    at: int, loader: Any, workers: int, tmp_path: Path
):
    """After an exception, SIGKILL, and SIGTERM: the step that it ends with is saved."""
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    whole, expected = fit(tmp_path / "whole", loader, **options)
    begun = at - at % 7 % 3
    ended = min(begun + 3, 7 if at < 7 else 14)  # of the window
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "raised", loader, Failing(at, error=ZeroDivisionError()), **options)
    new_process()
    with pytest.raises(SystemExit, check=lambda error: error.code == 143):
        fit(tmp_path / "asked", loader, killing(signal.SIGTERM, at), **options)
    arguments = (tmp_path / "killed", loader, killing(signal.SIGKILL, at))
    killed = multiprocessing.get_context("fork").Process(target=fit, args=arguments, kwargs=options)
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    for how, first in (("raised", [begun]), ("asked", [ended]), ("killed", range(begun + 1))):
        new_process()
        again, running = fit(tmp_path / how, loader, **options)
        assert again.seen in [whole.seen[each:] for each in first], how
        assert (running.global_step, running.current_epoch) == (expected.global_step, 2)
        assert all(map(torch.equal, whole.parameters(), again.parameters()))


class Corrupt(Dataset):
    """Rows of another data set; one row of each of the batches `bad` cannot be read."""

    def __init__(self, rows: Any, batch: int, bad: tuple[int, ...]) -> None:
        self.rows = rows
        self.unreadable = [each * batch + 1 for each in bad]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index in self.unreadable:
            raise OSError(f"row {index} is no image")
        return self.rows[index]


def skipped(folder: Path) -> list[list[int]]:
    """The batches of the faults that were answered by a skip; no fault has another answer."""
    faults = events(folder, "fault")
    assert {each.get("answer") for each in faults} <= {"skip_batch"}
    return [batch for each in faults for batch in each["batches"]]


def trained(folder: Path, bad: tuple[int, ...], **arguments: Any) -> Any:
    trainer = small_runs.trainer(folder, cls=small_runs.Recording, **arguments)
    trainer.train_dataset = Corrupt(small_runs.Rows(8), small_runs.BATCH, bad)
    heal_trainer(trainer, store=folder / "store", checkpoints=Checkpoints(every=5)).train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "workers"), [((0,), 0), ((5,), 2), ((6,), 0), ((6, 7), 0)])
def test_a_bad_batch_of_a_trainer_leaves_only_whole_windows(
    bad: tuple[int, ...], workers: int, tmp_path: Path
):
    """Batches of the next pass take the place of bad ones, so an epoch is as long as always."""
    options = {"gradient_accumulation_steps": 3, "dataloader_num_workers": workers}
    trainer = trained(tmp_path, bad, max_steps=6, **options)
    twice = [[epoch, batch] for epoch in (0, 1) for batch in bad]
    assert skipped(tmp_path / "store")[: len(twice)] == twice
    steps: dict[int, list[int]] = {}
    for step, batch in trainer.seen:
        steps.setdefault(step, []).append(batch)
    good = [each for each in range(8) if each not in bad]
    stream = cycle(good)
    windows = [[next(stream) for _ in range(size)] for size in (3, 3, 2, 3, 3, 2)]
    assert list(steps.values()) == windows


def test_a_restart_knows_the_skipped_batches(tmp_path: Path):
    """A batch is skipped after the step that was saved."""
    found = []
    stop = small_runs.calling("on_step_begin", small_runs.raising(ZeroDivisionError()), at=1)
    for name, callbacks in (("whole", []), ("broken", [stop]), ("broken", [])):
        with suppress(ZeroDivisionError):
            arguments = {"max_steps": 4, "gradient_accumulation_steps": 3, "callbacks": callbacks}
            found.append(trained(tmp_path / name, (5,), **arguments))
    whole, continued = found
    assert continued.seen == [each for each in whole.seen if each[0] >= 1]
    assert torch.equal(small_runs.weights(whole), small_runs.weights(continued))


class Validated(fits.Regression):
    """Records the epochs that were validated."""

    def on_validation_epoch_end(self) -> None:
        vars(self).setdefault("validated", []).append(self.trainer.current_epoch)


@pytest.mark.parametrize(
    ("loader", "bad", "first", "later"),
    [
        (DataLoader, (0, 3), [1, 2, 4, 5, 6, 7], [1, 2, 4, 5, 6, 7]),
        # The first batch of the next epoch ends the epoch.
        (StatefulDataLoader, (6, 7), [0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0]),
    ],
)
def test_a_bad_batch_of_a_fit_leaves_only_whole_windows(
    loader: Any, bad: Any, first: Any, later: Any, tmp_path: Path
):
    rows = fits.data(8)

    def loaders() -> list[Any]:
        return [loader(Corrupt(rows, 8, bad), batch_size=8), DataLoader(rows, 8)]

    options: Any = {"max_epochs": 3, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    options |= {"make": Validated, "loaders": loaders}
    module, trainer = fits.fit(LightningHealingCallback(store=tmp_path), **options)
    numbers = {float(rows[i * 8 : i * 8 + 8][0].sum()): i for i in range(8)}
    order = [(each.epoch, numbers[each.inputs]) for each in module.seen]
    expected = enumerate((first, later, later))
    assert order == [(epoch, batch) for epoch, batches in expected for batch in batches]
    assert vars(module)["validated"] == [0, 1, 2]
    assert len(skipped(tmp_path)) == 6
    assert trainer.current_epoch == 3
