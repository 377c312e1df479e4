"""Out of memory: smaller parts from then on, also after a restart, or a stop with a diagnosis."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healcore
from healcore.core.decision import Cause
from healcore.runtime.run.out_of_memory import GOOD_STEPS
from tests.healer.limited_memory import Memory
from tests.healer.run_directory import events, postmortems
from tests.healer.run_options import grouped
from tests.open_run import run_of
from tests.runtime.faults.fault_page import assert_on_the_page


def train(
    batches: int,
    memory: Memory,
    policy: Any = "default",
    each_step: Callable[[healcore.Healer[Any]], object] = lambda healer: None,
    part_limit: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Trains on batches of 8 samples, and returns the weights of the linear model."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    random = torch.Generator().manual_seed(1)
    data = [torch.randn(8, 2, generator=random) for _ in range(batches)]
    with healcore.Healer(policy, state=state, **grouped(options)) as healer:
        if part_limit is not None:
            run_of(healer).record.part_size.limit = part_limit
        for batch in healer.batches(data):
            memory.step = healer.step
            for part in healer.microbatches(batch):
                with part:
                    memory.use(len(part.batch))
                    (model(part.batch).square().mean() * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            each_step(healer)
    return model.weight.detach()


def test_the_size_that_fits_is_found_once_and_kept(tmp_path: Path, capsys):
    memory = Memory(fits=3)
    train(5, memory, store=tmp_path)
    assert memory.failures == 2
    assert memory.sizes == [2, 2, 2, 2] * 5
    faults = events(tmp_path, "fault")
    sizes = [(e["size_before"], e["size"]) for e in faults]
    assert sizes == [(8, 4), (4, 2)]
    assert [(e["cause"], e["answer"]) for e in faults] == [(["OOM"], "shrink_microbatch")] * 2
    assert "OutOfMemoryError: CUDA out of memory" in faults[0]["problem"]
    printed = capsys.readouterr().err
    assert_on_the_page(Cause.OOM, printed, tmp_path)
    end = printed.splitlines()[-1]
    assert "split the batch 2 times" in end
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


def test_the_budget_of_shrinks_ends_the_run():
    memory = Memory(fits=1)
    with pytest.raises(healcore.RunStopped, match="permits it 2 times"):
        train(2, memory, budget={"shrinks": 2})
    assert memory.failures == 3


@pytest.mark.parametrize(
    ("policy", "note"),
    [("observe", "only observes"), ("zclip", "no rule for out of memory: add to = ")],
)
def test_a_policy_that_does_not_answer(policy, note):
    """The error is raised as it came, with a note about what the policy lacks."""
    memory = Memory(fits=4)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(1, memory, policy)
    assert raised.value is memory.error
    assert note in "".join(memory.error.__notes__)
    assert memory.failures == 1


def test_gradients_from_elsewhere_are_not_lost():
    """A backward pass outside of the parts cannot be done again."""
    model = nn.Linear(2, 1)
    memory = Memory(fits=4)
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


class Sometimes(Memory):
    """Memory for any part, except in the steps of `failing`, where 2 samples fit."""

    def __init__(self, *failing: int) -> None:
        super().__init__(fits=2)
        self.failing = failing

    def use(self, samples: int) -> None:
        if self.step in self.failing:
            super().use(samples)
        else:
            self.sizes.append(samples)


def sizes_by_step(memory: Memory) -> list[int]:
    """The size of the parts of each step, all of which train on 8 samples in equal parts."""
    found: list[int] = []
    left = list(memory.sizes)
    while left:
        size = left[0]
        assert left[: 8 // size] == [size] * (8 // size)
        found.append(size)
        del left[: 8 // size]
    return found


def test_larger_parts_are_tried_again_after_one_step_that_did_not_fit(capsys):
    """Twice the size after `GOOD_STEPS` steps, and twice that after as many more."""
    memory = Sometimes(5)
    train(260, memory)
    sizes = sizes_by_step(memory)
    assert sizes == [8] * 5 + [2] * GOOD_STEPS + [4] * GOOD_STEPS + [8] * (255 - 2 * GOOD_STEPS)
    assert memory.failures == 2
    printed = capsys.readouterr().err
    assert printed.count("samples at a time again") == 2
    grown = 5 + 2 * GOOD_STEPS
    assert f"step {grown}: tries up to 8 samples at a time again" in printed


def test_a_size_that_never_fits_is_tried_once(tmp_path: Path):
    """Its trial spends no budget, and no batch is lost or trained twice."""
    steps = 4 * GOOD_STEPS
    memory = Memory(fits=4)
    weight = train(steps, memory, budget={"shrinks": 1}, store=tmp_path)
    assert sizes_by_step(memory) == [4] * steps
    assert [each["step"] for each in events(tmp_path, "fault")] == [0, GOOD_STEPS]
    split = Memory(fits=4)
    assert torch.equal(weight, train(steps, split, part_limit=4))


def test_steps_that_fail_now_and_then_spend_the_budget_once(tmp_path: Path):
    """Each time the parts return to the size that fits, and no run ends because of it."""
    failing = [*range(50, 500, 150)]
    memory = Sometimes(*failing)
    train(500, memory, budget={"shrinks": 2}, store=tmp_path)
    sizes = sizes_by_step(memory)
    assert [sizes[step] for step in failing] == [2] * len(failing)
    assert {*sizes} == {2, 4, 8}
    assert len(events(tmp_path, "fault")) == memory.failures


@pytest.mark.parametrize(
    "killed", [152, *(pytest.param(k, marks=pytest.mark.slow) for k in (60, 151, 251, 260))]
)
def test_a_restart_tries_the_sizes_of_the_run_that_was_not_killed(tmp_path: Path, killed: int):
    """Steps 50 and 51 fail, so that trials are due in steps 150 and 250; step 251 fails."""
    failing = 50, 51, 251, 252

    def end(healer: healcore.Healer[Any]) -> None:
        if healer.step + 1 == killed:
            raise ZeroDivisionError

    whole = Sometimes(*failing)
    weight = train(360, whole)
    before, after = Sometimes(*failing), Sometimes(*failing)
    with pytest.raises(ZeroDivisionError):
        train(360, before, each_step=end, store=tmp_path, save_every=10)
    assert torch.equal(weight, train(360, after, store=tmp_path, save_every=10))
    assert before.sizes + after.sizes == whole.sizes
    assert {*sizes_by_step(whole)} == {2, 4, 8}


def test_no_trial_where_a_window_cannot_be_repeated():
    """Gradients from elsewhere would be lost if the larger part did not fit."""
    model = nn.Linear(2, 1)
    memory = Memory(fits=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with healcore.Healer(state={"model": model, "optimizer": optimizer}) as healer:
        for batch in healer.batches([torch.ones(8, 2)] * (2 * GOOD_STEPS)):
            if healer.step:
                model.weight.square().sum().backward()
            for part in healer.microbatches(batch):
                with part:
                    memory.use(len(part.batch))
                    (model(part.batch).square().mean() * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert memory.failures == 1


def test_a_rollback_keeps_the_size():
    """Memory runs out in step 125. Then the run goes back to step 120, and repeats it."""
    memory = Sometimes(125)
    sizes: dict[int, int] = {}

    def end_step(healer: healcore.Healer[Any]) -> None:
        sizes[memory.step] = memory.sizes[-1]
        if memory.step == 130:
            memory.failing = ()
            if not healer.rollbacks:
                with torch.no_grad():
                    healer.state["model"].weight.fill_(torch.nan)
        rollbacks.append(healer.rollbacks)

    rollbacks: list[int] = []
    train(250, memory, each_step=end_step, save_every=20)
    assert rollbacks[-1] == 1
    assert len(rollbacks) > len(sizes)
    expected = [8] * 120 + [2] * (5 + GOOD_STEPS) + [4] * (len(sizes) - 125 - GOOD_STEPS)
    assert [sizes[step] for step in range(len(sizes))] == expected
    assert expected[-1] == 4
