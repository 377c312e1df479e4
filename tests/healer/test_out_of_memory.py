"""Out of memory: smaller parts from then on, also after a restart, or a stop with a diagnosis."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healcore
from healcore import events
from tests.events.sample_events import problems
from tests.healer.run_options import grouped

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")


class Memory:
    """A forward pass with more samples than `fits` raises."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.failures = 0
        self.sizes: list[int] = []

    def use(self, samples: int) -> None:
        if samples > self.fits:
            self.failures += 1
            raise OUT_OF_MEMORY
        self.sizes.append(samples)


def batches(number: int, samples: int = 8) -> list[torch.Tensor]:
    return [torch.full((samples, 2), float(i)) for i in range(number)]


def train(
    data: Iterable[Any],
    memory: Memory,
    policy: Any = "default",
    each_step: Callable[[healcore.Healer[Any]], object] = lambda healer: None,
    **options: Any,
) -> healcore.Healer[Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with healcore.Healer(policy, state=state, **grouped(options)) as healer:
        for batch in healer.batches(data):
            for part in healer.microbatches(batch):
                with part:
                    memory.use(len(part.batch))
                    (model(part.batch).square().mean() * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            each_step(healer)
    return healer


def kinds(path: Path, *wanted: str) -> list[dict[str, Any]]:
    found = events.read(path).events
    assert [problem for each in found for problem in problems(each)] == []
    return [each for each in found if each["kind"] in wanted]


# -- shrinking ------------------------------------------------------------------------------------


def test_the_size_that_fits_is_found_once_and_kept(tmp_path, capsys):
    memory = Memory(fits=3)
    train(batches(5), memory, events=tmp_path / "events.jsonl")
    assert memory.failures == 2
    assert memory.sizes == [2, 2, 2, 2] * 5
    faults = kinds(tmp_path / "events.jsonl", "fault")
    sizes = [(e["samples"], e["size_before"], e["size"]) for e in faults]
    assert sizes == [(8, 8, 4), (8, 4, 2)]
    assert [(e["cause"], e["answer"]) for e in faults] == [(["OOM"], "shrink_microbatch")] * 2
    assert "OutOfMemoryError: CUDA out of memory" in faults[0]["problem"]
    end = capsys.readouterr().err.splitlines()[-1]
    assert "split the batch 2 times when memory ran out" in end
    assert "no intervention" not in end


def test_a_restart_does_not_run_out_of_memory_again(tmp_path):
    def end(healer: healcore.Healer[Any]) -> None:
        if healer.step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(batches(6), Memory(fits=3), each_step=end, store=tmp_path / "run", save_every=1)
    memory = Memory(fits=3)
    train(batches(6), memory, store=tmp_path / "run")
    assert memory.failures == 0
    assert set(memory.sizes) == {2}


def test_a_single_sample_that_does_not_fit_stops_the_run(tmp_path):
    with pytest.raises(healcore.RunStopped) as stopped:
        train(batches(2), Memory(fits=0), events=tmp_path / "events.jsonl")
    assert stopped.value.why == "a single sample does not fit into memory"
    assert "activation checkpointing" in stopped.value.diagnosis
    assert stopped.value.__cause__ is OUT_OF_MEMORY
    (stop,) = kinds(tmp_path / "events.jsonl", "stop")
    assert stop["cause"] == ["OOM"]
    (end,) = kinds(tmp_path / "events.jsonl", "end")
    assert end["ending"] == "stopped"
    (postmortem,) = tmp_path.glob("*postmortem*.json")
    assert "activation checkpointing" in postmortem.read_text()


def test_the_budget_of_shrinks(tmp_path):
    memory = Memory(fits=1)
    with pytest.raises(healcore.RunStopped, match="permits it 2 times"):
        train(batches(2), memory, budget={"shrinks": 2})
    assert memory.failures == 3


def test_a_step_that_fails_in_the_network_is_repeated_unchanged(tmp_path, monkeypatch):
    memory, calls = Memory(fits=8), []
    use = memory.use

    def failing(samples: int) -> None:
        calls.append(samples)
        if len(calls) in (2, 3):
            raise ConnectionResetError
        use(samples)

    monkeypatch.setattr(memory, "use", failing)
    train(batches(2), memory, events=tmp_path / "events.jsonl", retry={"base_delay_s": 1e-3})
    assert memory.sizes == [8, 8]
    found = kinds(tmp_path / "events.jsonl", "fault", "retried")
    assert [each.get("answer") for each in found] == ["retry", "retry", None]


# -- what is not healed goes on as it was ---------------------------------------------------------


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__
    return note


@pytest.fixture
def out_of_memory(monkeypatch):
    """A new exception for each test, since notes stay on it."""
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(sys.modules[__name__], "OUT_OF_MEMORY", error)
    return error


@pytest.mark.parametrize(
    ("policy", "note"),
    [("observe", "only observes"), ("zclip", "no rule for out of memory: add to = ")],
)
def test_a_policy_that_does_not_answer(out_of_memory, policy, note):
    memory = Memory(fits=4)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(batches(1), memory, policy)
    assert raised.value is out_of_memory
    assert note in note_of(out_of_memory)
    assert memory.failures == 1


def test_gradients_from_elsewhere_are_not_lost(out_of_memory):
    """A backward pass outside of the parts cannot be done again."""
    model, memory = nn.Linear(2, 1), Memory(fits=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def step(healer: healcore.Healer[Any]) -> None:
        for part in healer.microbatches(torch.ones(8, 2)):
            with part:
                memory.use(len(part.batch))

    with healcore.Healer(state=state) as healer:
        model.weight.square().sum().backward()
        gradient = model.weight.grad
        assert gradient is not None
        expected = gradient.clone()
        with pytest.raises(torch.OutOfMemoryError):
            step(healer)
        assert "gradients existed before the first part" in note_of(out_of_memory)
        assert torch.equal(gradient, expected)
        assert model.weight.grad is gradient
        optimizer.step()
        optimizer.zero_grad()
        step(healer)
        healer.after_step()
    assert memory.sizes == [4, 4]
    with healcore.Healer(state=state) as healer:
        healer._loop.record.part_limit = 4
        model.weight.square().sum().backward()
        step(healer)  # a known size needs no second attempt
        optimizer.step()
        healer.after_step()
    assert memory.sizes == [4] * 4
