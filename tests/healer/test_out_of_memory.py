"""Out of memory: smaller parts from then on, also after a restart, or a stop with a diagnosis."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healcore
from healcore.core.decision import Cause
from tests.healer.run_directory import events, postmortems
from tests.healer.run_options import grouped
from tests.runtime.faults.test_page import assert_on_the_page


class Memory:
    """A forward pass with more samples than `fits` raises."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.failures = 0
        self.sizes: list[int] = []
        self.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0")

    def use(self, samples: int) -> None:
        if samples > self.fits:
            self.failures += 1
            raise self.error
        self.sizes.append(samples)


def train(
    batches: int,
    memory: Memory,
    policy: Any = "default",
    each_step: Callable[[healcore.Healer[Any]], object] = lambda healer: None,
    **options: Any,
) -> None:
    """Trains on batches of 8 samples."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with healcore.Healer(policy, state=state, **grouped(options)) as healer:
        for batch in healer.batches([torch.full((8, 2), float(i)) for i in range(batches)]):
            for part in healer.microbatches(batch):
                with part:
                    memory.use(len(part.batch))
                    (model(part.batch).square().mean() * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            each_step(healer)


def test_the_size_that_fits_is_found_once_and_kept(tmp_path: Path, capsys):
    memory = Memory(fits=3)
    train(5, memory, store=tmp_path)
    assert memory.failures == 2
    assert memory.sizes == [2, 2, 2, 2] * 5
    faults = events(tmp_path, "fault")
    sizes = [(e["samples"], e["size_before"], e["size"]) for e in faults]
    assert sizes == [(8, 8, 4), (8, 4, 2)]
    assert [(e["cause"], e["answer"]) for e in faults] == [(["OOM"], "shrink_microbatch")] * 2
    assert "OutOfMemoryError: CUDA out of memory" in faults[0]["problem"]
    printed = capsys.readouterr().err
    assert_on_the_page(Cause.OOM, printed, tmp_path)
    end = printed.splitlines()[-1]
    assert "split the batch 2 times when memory ran out" in end
    assert "no intervention" not in end


def test_a_restart_does_not_run_out_of_memory_again(tmp_path: Path):
    def end(healer: healcore.Healer[Any]) -> None:
        if healer.step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(6, Memory(fits=3), each_step=end, store=tmp_path, save_every=1)
    memory = Memory(fits=3)
    train(6, memory, store=tmp_path)
    assert memory.failures == 0
    assert set(memory.sizes) == {2}


def test_a_single_sample_that_does_not_fit_stops_the_run(tmp_path: Path):
    memory = Memory(fits=0)
    with pytest.raises(healcore.RunStopped) as stopped:
        train(2, memory, store=tmp_path)
    assert stopped.value.why == "a single sample does not fit into memory"
    assert stopped.value.__cause__ is memory.error
    assert events(tmp_path, "stop")[0]["cause"] == ["OOM"]
    assert "activation checkpointing" in postmortems(tmp_path)[0]["diagnosis"]


def test_the_budget_of_shrinks():
    memory = Memory(fits=1)
    with pytest.raises(healcore.RunStopped, match="permits it 2 times"):
        train(2, memory, budget={"shrinks": 2})
    assert memory.failures == 3


@pytest.mark.parametrize(
    ("policy", "note"),
    [("observe", "only observes"), ("zclip", "no rule for out of memory: add to = ")],
)
def test_a_policy_that_does_not_answer(policy, note):
    memory = Memory(fits=4)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(1, memory, policy)
    assert raised.value is memory.error
    assert note in "".join(memory.error.__notes__)
    assert memory.failures == 1


def test_gradients_from_elsewhere_are_not_lost():
    """A backward pass outside of the parts cannot be done again."""
    model, memory = nn.Linear(2, 1), Memory(fits=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(healer: healcore.Healer[Any]) -> None:
        for part in healer.microbatches(torch.ones(8, 2)):
            with part:
                memory.use(len(part.batch))

    with healcore.Healer(state={"model": model, "optimizer": optimizer}) as healer:
        model.weight.square().sum().backward()
        gradient: Any = model.weight.grad
        expected = gradient.clone()
        with pytest.raises(torch.OutOfMemoryError):
            step(healer)
        assert "gradients existed before the first part" in memory.error.__notes__[0]
        assert torch.equal(gradient, expected)
        assert model.weight.grad is gradient
        optimizer.step()
        optimizer.zero_grad()
        step(healer)
        healer.after_step()
    assert memory.sizes == [4, 4]
