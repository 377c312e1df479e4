"""A batch that raises the same exception in two starts is skipped by the third start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch import LightningHealingCallback, heal_trainer
from tests.healer.run_directory import events
from tests.healer.training_loops import loop_of
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.lightning import fits

LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(20)),
    "torch": lambda: DataLoader(range(20), batch_size=None),
}


class Start:
    """One start of a program whose loop raises at some batches, before or after its step."""

    def __init__(self, folder: Path, raises: dict[int, Exception], **options: Any) -> None:
        self.folder, self.raises, self.options = folder, raises, options
        self.trained: list[int] = []

    def __call__(self, framework: str = "torch", loader: str = "list", after: bool = False) -> str:
        """Returns the type of the exception, or an empty string."""
        try:
            self.train(loop_of(framework, policy="default"), LOADERS[loader](), after)
        except Exception as error:
            return type(error).__name__
        return ""

    def train(self, loop: Any, loader: Iterable[int], after: bool) -> None:
        every = Checkpoints(every=5)
        with Healer(
            "default", state=loop.state, store=self.folder, checkpoints=every, **self.options
        ) as healer:
            for each in healer.batches(loader):
                number = int(each)
                if not after and number in self.raises:
                    raise self.raises[number]
                if after and number in self.raises:
                    loop.faults.always |= {number}
                loop.step(healer, number)
                if after and number in self.raises:
                    raise self.raises[number]
                self.trained.append(number)


def rest(*skipped: int, first: int = 0) -> list[int]:
    return [number for number in range(first, 20) if number not in skipped]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("loader", LOADERS)
def test_the_third_start_skips_the_batch_and_says_so(
    framework: str, loader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    start = Start(tmp_path, {7: ValueError("loss is nan"), 12: IndexError("index 99 of 64")})
    assert [start(framework, loader) for _ in range(2)] == ["ValueError"] * 2
    assert "raised in two starts" not in capsys.readouterr().err
    assert [start(framework, loader) for _ in range(3)] == ["IndexError"] * 2 + [""]
    text = "step 7: batch 7 of epoch 0 raised in two starts and is skipped: ValueError: loss"
    assert capsys.readouterr().err.count(text) == 1
    assert start.trained == rest(7, 12)  # each of the others once
    skips = [each["batches"] for each in events(tmp_path, "fault") if each.get("answer") != "save"]
    assert [each for each in skips if each] == [[[0, 7]], [[0, 12]]]


def test_a_loss_that_is_refused_after_its_step(tmp_path: Path):
    """The NaN prevents the save at the exception, so each start trains on the batch again."""
    start = Start(tmp_path, {12: FloatingPointError("loss is nan")})
    assert [start(after=True) for _ in range(3)] == ["FloatingPointError"] * 2 + [""]
    assert start.trained[-9:] == rest(12, first=10)


def test_one_batch_of_an_accumulation_is_skipped(tmp_path: Path):
    def train(seen: list[int]) -> None:
        loop = loop_of("torch")
        with Healer("default", state=loop.state, store=tmp_path) as healer:
            for number in healer.batches(list(range(21))):
                if number == 9:  # the second of the step's four batches
                    raise KeyError("no such row")
                inputs, targets = map(torch.from_numpy, loop.faults.batch(number))
                loss = (loop.model(inputs) - targets).square().mean()
                healer.observe(loss)
                loss.backward()
                seen.append(number)
                if len(seen) % 4 == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()

    for _ in range(2):
        with pytest.raises(KeyError):
            train([])
    seen: list[int] = []
    train(seen)
    assert seen == [8, *range(10, 21)]


@pytest.mark.parametrize(
    "errors",
    [
        [ValueError("a"), KeyError("a"), ValueError("b")],
        [MemoryError(), MemoryError(), MemoryError()],
        [ConnectionError(), ConnectionError(), ConnectionError()],
    ],
)
def test_what_does_not_come_from_the_batch_is_raised_at_each_start(errors: Any, tmp_path: Path):
    for error in errors:
        assert Start(tmp_path, {7: error})() == type(error).__name__
    start = Start(tmp_path, {})
    assert start() == ""
    assert start.trained == rest(first=7)


def test_a_mistake_at_the_first_batch_skips_no_batch(tmp_path: Path):
    assert {Start(tmp_path, {0: TypeError("wrong")})() for _ in range(4)} == {"TypeError"}


def test_at_most_a_few_batches_of_a_run_are_skipped(tmp_path: Path):
    start = Start(tmp_path, dict.fromkeys(range(7, 20), ValueError("no")))
    assert {start() for _ in range(9)} == {"ValueError"}
    assert start.trained == list(range(7))
    found = [each["batches"] for each in events(tmp_path, "fault") if each.get("batches")]
    assert sorted({batches[0][1] for batches in found}) == [7, 8, 9]


def test_a_policy_that_observes_skips_no_batch(tmp_path: Path):
    start = Start(tmp_path, {7: ValueError("no")}, mode="observe")
    assert {start() for _ in range(3)} == {"ValueError"}


# -- trainers -------------------------------------------------------------------------------------


class Refuses(small_runs.InOrder):
    """Raises for the rows of one batch, as a loss that refuses NaN does."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not inputs["labels"].isfinite().all():
            raise ValueError("the labels are not finite")
        vars(self).setdefault("seen", []).append(round(float(inputs["x"][0, 0]), 4))
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("parts", [1, 4])
def test_heal_trainer(parts: int, tmp_path: Path):
    """With accumulation the Trainer reads all micro-batches of a step before the first."""

    def train() -> Any:
        run = small_runs.trainer(
            tmp_path,
            steps=8,
            cls=Refuses,
            scaled={13: float("nan")} if parts > 1 else {5: float("nan")},
            gradient_accumulation_steps=parts,
        )
        healed = heal_trainer(run, "default")
        healed.train()
        return run

    for _ in range(2):
        with pytest.raises(ValueError, match="not finite"):
            train()
    run = train()
    assert run.state.global_step == 8
    rows = run.train_dataset.x[:: small_runs.BATCH, 0]
    numbers = [12, *range(14, 32)] if parts > 1 else [6, 7, 0]  # 0 of the next epoch
    # The first batch is also the first argument of `loss_fn`.
    assert list(dict.fromkeys(run.seen)) == [round(float(rows[each]), 4) for each in numbers]


def test_lightning(tmp_path: Path):
    class Refuses(fits.Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not loss.isfinite():
                raise ValueError("refused")
            return loss

    def train() -> list[int]:
        module, rows = Refuses(), fits.data(8, bad=5)
        callback = LightningHealingCallback(store=tmp_path)
        trainer = fits.trainer(callback, max_epochs=1, accumulate_grad_batches=2)
        try:
            trainer.fit(module, DataLoader(rows, 8))
        finally:
            numbers = {float(rows[i * 8 : i * 8 + 8][0].sum()): i for i in range(8)}
            seen = [numbers.get(each.inputs, 5) for each in module.seen]
        return seen

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            train()
    assert train() == [0, 1, 2, 3, 4, 6, 7]  # no save within the closure
