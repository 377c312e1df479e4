"""Out of memory in a comparison of weights: the `loss_fn` evaluates smaller parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healcore
from tests.healer.limited_memory import Memory
from tests.healer.run_options import grouped


def compared(
    memory: Memory, *, trains_with: int, loss_is: str = "mean"
) -> tuple[float, healcore.Healer[Any]]:
    """The largest weight at the end of a run whose weights are damaged at step 100.

    The `loss_fn` has the memory `memory`; a step has memory for `trains_with` samples.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 4, generator=random) for _ in range(180)]
    data = [{"x": x, "y": x.sum(1), "mask": x[:, 0] > -1} for x in inputs]
    step_memory = Memory(fits=trains_with)

    def loss_of(batch: Any) -> torch.Tensor:
        errors = (model(batch["x"]).squeeze(1) - batch["y"]).square()
        return errors.mean() if loss_is == "mean" else errors.sum()

    def loss_fn(batch: Any) -> torch.Tensor:
        memory.use(len(batch["x"]))
        return loss_of(batch)

    state = {"model": model, "optimizer": optimizer}
    options = grouped({"save_every": 20})
    with healcore.Healer(state=state, loss_fn=loss_fn, **options) as healer:
        for batch in healer.batches(data):
            for part in healer.microbatches(batch):
                with part:
                    step_memory.use(len(part.batch["x"]))
                    loss = loss_of(part.batch)
                    healer.observe(loss)
                    (loss * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            if healer.step == 100 and not healer.rollbacks:
                with torch.no_grad():
                    model.weight.mul_(30)
                optimizer.param_groups[0]["lr"] = 1e-5
    return float(model.weight.detach().abs().max()), healer


@pytest.mark.parametrize(
    ("fits", "trains_with", "loss_is"),
    [(2, 2, "mean"), pytest.param(2, 2, "sum", marks=pytest.mark.slow), (3, 8, "mean")],
    ids=["both", "a sum", "only loss_fn"],
)
def test_comparisons_evaluate_the_parts_that_fit(fits, trains_with, loss_is, caplog):
    caplog.set_level("INFO", "healcore")
    memory = Memory(fits=fits)
    weight, healer = compared(memory, trains_with=trains_with, loss_is=loss_is)
    assert healer.rollbacks >= 1
    assert weight < 3
    assert "not called again" not in caplog.text
    assert max(memory.sizes) <= fits
    assert memory.failures == (2 if fits < trains_with else 0), "8 and 4"
    assert caplog.text.count("a comparison of weights does not fit into memory") == memory.failures


class FromStep(Memory):
    """Memory for 2 samples at a time, and from a step on for more."""

    def __init__(self, step: int, fits: int) -> None:
        super().__init__(fits=2)
        self.from_step, self.then = step, fits
        self.by_step: list[tuple[int, int]] = []

    def use(self, samples: int) -> None:
        if self.step >= self.from_step:
            self.fits = self.then
        super().use(samples)
        self.by_step.append((self.step, samples))


def compares(memory: FromStep, steps: int = 460, **options: Any) -> None:
    """A run that is healthy, and whose `loss_fn` has the memory `memory`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    data = [torch.randn(8, 4, generator=random) for _ in range(steps)]

    def loss_fn(batch: Any) -> torch.Tensor:
        memory.use(len(batch))
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()

    state = {"model": model, "optimizer": optimizer}
    stops_at = options.pop("stops_at", None)
    with healcore.Healer(state=state, loss_fn=loss_fn, **grouped(options)) as healer:
        for batch in healer.batches(data):
            memory.step = healer.step
            if memory.step == stops_at:
                raise ZeroDivisionError
            loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not healer.rollbacks


def test_parts_of_comparisons_do_not_grow_again(caplog):
    """Memory that comes back later is not tried."""
    caplog.set_level("INFO", "healcore")
    memory = FromStep(20, fits=8)
    compares(memory)
    assert memory.failures == 2
    assert {samples for step, samples in memory.by_step if step >= 20} == {2}
    assert "not called again" not in caplog.text


def test_a_restart_evaluates_the_parts_of_the_run_that_was_not_killed(tmp_path: Path):
    whole, before, after = (FromStep(20, fits=8) for _ in range(3))
    compares(whole)
    options = {"store": tmp_path, "save_every": 10}
    with pytest.raises(ZeroDivisionError):
        compares(before, stops_at=170, **options)
    compares(after, **options)
    assert after.failures == 0
    later = [[each for each in run.by_step if each[0] > 175] for run in (whole, after)]
    assert later[0] == later[1], "the restart calls the loss_fn on its first batch too"
    assert {samples for _, samples in later[1]} == {2}


def test_a_loss_fn_that_no_sample_fits_is_given_up(caplog):
    _, healer = compared(Memory(fits=0), trains_with=8)
    assert not healer.rollbacks
    assert "loss_fn raised OutOfMemoryError" in caplog.text
