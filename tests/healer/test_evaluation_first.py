"""A program that evaluates before its training loop, and is killed or ends and starts again."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Action, Checkpoints, Healer, Hooks
from healcore.errors import Terminated
from tests.healer.run_directory import new_process
from tests.healer.simulated_kills import Crash, die_at_the_end

TRAINING = [torch.full((2, 3), float(number)) for number in range(20)]
VALIDATION = [torch.zeros(2, 3) for _ in range(3)]


def program(
    store: Path,
    *,
    after_step: Callable[[int], None] = lambda step: None,
    nan_at: int | None = None,
) -> list[int]:
    """Evaluates, then trains; returns the numbers of the training batches of this start."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    read: list[int] = []
    options: Any = {
        "checkpoints": Checkpoints(every=10),
        "hooks": Hooks(on_incident=lambda incident: Action.ROLLBACK),
    }
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, store=store, **options) as healer:
        for batch in healer.batches(VALIDATION):
            model(batch)
        for batch in healer.batches(TRAINING):
            read.append(int(batch[0, 0]))
            loss = model(batch).square().mean()
            if nan_at == read[-1]:
                loss = loss * torch.nan
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(read[-1] + 1)
    return read


def raise_at(last: int) -> Callable[[int], None]:
    def after_step(step: int) -> None:
        if step == last:
            raise KeyError("the program's own error")

    return after_step


def kill_at(last: int) -> Callable[[int], None]:
    def after_step(step: int) -> None:
        if step == last:
            raise Crash

    return after_step


def test_a_start_after_a_save_in_the_body_keeps_the_place_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The exception saves step 10 in the body. The next start evaluates, and is then killed."""
    with pytest.raises(KeyError):
        program(tmp_path, after_step=raise_at(10))
    new_process()
    with monkeypatch.context() as patch:
        die_at_the_end(patch)
        with pytest.raises(Crash):
            program(tmp_path, after_step=kill_at(13))
    new_process()
    assert program(tmp_path) == list(range(10, 20))


def test_a_start_after_a_rollback_at_a_signal_repeats_the_steps(tmp_path: Path):
    """A signal ends the run right after the bad step. The next start evaluates before it trains."""

    def stop(step: int) -> None:
        if step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        program(tmp_path, after_step=stop, nan_at=8)
    new_process()
    read = program(tmp_path)
    assert read == [*range(8), *range(9, 20)], "the rollback repeats all steps but the bad one"


@pytest.mark.parametrize("last", [7, 17, 20])
def test_an_order_drawn_in_each_pass_is_the_same_after_two_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
):
    """The evaluation draws random numbers too, and counts as a pass of the program."""

    def start(store: Path, kill_after: int | None) -> list[int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        read: list[int] = []
        state = {"model": model, "optimizer": optimizer}
        with Healer(
            "default", state=state, store=store, checkpoints=Checkpoints(every=4)
        ) as healer:
            for batch in healer.batches(VALIDATION):
                model(batch + torch.randn(3))
            for _ in range(3):
                order = torch.randperm(10).tolist()
                for number in healer.batches(order):
                    read.append(number)
                    loss = model(TRAINING[number]).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if healer.step == kill_after:
                        raise Crash
        return read

    whole = start(tmp_path / "whole", None)
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        die_at_the_end(patch)
        for kill_after in (last, last + 3):
            new_process()
            with pytest.raises(Crash):
                start(killed, kill_after)
    new_process()
    rest = start(killed, None)
    assert rest == whole[-len(rest) :]
