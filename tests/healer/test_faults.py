"""Faults of whole runs: unreadable batches, exceptions within a step, network calls."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Healer, retrying
from healcore.core.decision import Cause
from healcore.errors import Terminated
from healcore.policy import load
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import (
    ANSWERS,
    BOTH_FRAMEWORKS,
    EVERY_5,
    Faults,
    TorchLoop,
    at,
    loop_of,
    rules,
    train,
    with_answers,
)
from tests.runtime.faults.fault_page import assert_on_the_page
from tests.runtime.faults.local_server import by_requests, serving


class Corrupt(Dataset):
    def __init__(self, count: int, bad: Iterable[int]) -> None:
        self.count = count
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        if index in self.bad:
            raise OSError(5, "input/output error")
        return index


def loader(count: int, bad: Iterable[int]) -> DataLoader:
    return DataLoader(Corrupt(count, bad), batch_size=None)


class Dies(Corrupt):
    def __init__(self, by: int) -> None:
        super().__init__(20, ())
        self.by = by

    def __getitem__(self, index: int) -> int:
        if index == 7:
            time.sleep(1)  # the loop waits for this row, so that the exception is raised there
            os.kill(os.getpid(), self.by) if self.by else os._exit(3)
        return index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "by"),
    [(DataLoader, signal.SIGKILL), (StatefulDataLoader, signal.SIGBUS), (StatefulDataLoader, 0)],
)
def test_a_worker_that_dies_is_no_network_failure_and_no_unreadable_batch(
    kind, by, tmp_path, capsys
):
    """The message may come from a signal handler, while the loader reads from a socket."""
    rows = kind(Dies(by), batch_size=None, num_workers=2)
    with pytest.raises((RuntimeError, OSError, EOFError)):
        train(loop_of("torch"), load("default"), rows, store=tmp_path)
    (fault,) = events(tmp_path, "fault")
    assert fault["cause"] == ["WORKER"]
    (found,) = postmortems(tmp_path)
    diagnosis = " ".join(found["diagnosis"].split())
    assert "num_workers" in diagnosis
    assert "network" not in diagnosis
    if by == signal.SIGKILL:
        assert_on_the_page(Cause.WORKER, capsys.readouterr().err, tmp_path)


@pytest.mark.slow
@BOTH_FRAMEWORKS
def test_an_unreadable_batch_is_left_out_and_logged(framework, tmp_path):
    policy = load("default")
    loop = loop_of(framework, policy=policy)
    result = train(loop, policy, loader(20, [5, 11, 12]), store=tmp_path)
    assert loop.faults.order == [n for n in range(20) if n not in (5, 11, 12)]
    assert result.step == 17
    faults = events(tmp_path, "fault")
    assert [each["batches"] for each in faults] == [[[0, 5]], [[0, 11]], [[0, 12]]]
    assert {each["answer"] for each in faults} == {"skip_batch"}
    assert "batch 5 of epoch 0 (rows 5) cannot be read: OSError" in faults[0]["problem"]


@pytest.mark.parametrize(
    ("bad", "limits", "ends"),
    [
        pytest.param([4, 5, 6, 7], {}, True, id="four in a row"),
        pytest.param(range(2, 20, 2), {"consecutive": 1, "count": 3}, True, id="more than three"),
        pytest.param(
            range(2, 20, 2),
            {"consecutive": 1, "count": 3, "within": 6},
            False,
            id="more than three, not within six",
        ),
    ],
)
def test_beyond_the_limits_the_error_ends_the_run(bad, limits, ends, tmp_path):
    policy = with_answers(skip_batch=limits)
    with pytest.raises(OSError, match="input") if ends else contextlib.nullcontext() as raised:
        train(loop_of("torch"), policy, loader(20, bad), store=tmp_path)
    assert len(events(tmp_path, "fault")) == (4 if ends else 9)
    if raised is not None:
        assert any("the limit of [skip_batch]" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("data", [Corrupt, loader])
def test_it_stays_left_out_after_a_rollback_and_a_restart(data, tmp_path, capsys):
    """Also by a loader that cannot be rewound, which reads it again to come to where it was."""
    policy = with_answers()
    stop = at(24, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
    loop = loop_of("torch", Faults(always=[18]))
    with pytest.raises(Terminated):
        train(loop, policy, data(30, [12]), store=tmp_path, before=stop)
    assert len(events(tmp_path, "rollback")) == 1
    after = loop_of("torch")
    train(after, policy, data(30, [12]), store=tmp_path)
    assert after.faults.order == [25, 26, 27, 28, 29]
    assert len(events(tmp_path, "fault")) == 1
    assert 12 not in {*loop.faults.order, *after.faults.order}
    if data is Corrupt:  # no loader that names rows
        assert_on_the_page(Cause.DATA, capsys.readouterr().err, tmp_path)


@BOTH_FRAMEWORKS
def test_a_checkpoint_before_an_exception_within_the_step_ends_the_run(framework, tmp_path, capsys):
    loop = loop_of(framework, policy=load("default"))
    with pytest.raises(ZeroDivisionError):
        train(loop, "default", range(12), store=tmp_path, before=at(7, lambda _: 1 // 0))
    save = events(tmp_path, "save")[-1]
    assert (save["step"], save["why"]) == (7, "emergency")
    (fault,) = events(tmp_path, "fault")
    assert (fault["cause"], fault["answer"]) == (["UNKNOWN"], "save")
    (found,) = postmortems(tmp_path)
    assert found["ending"] == "exception"
    assert "ZeroDivisionError: " in found["exception"]
    assert_on_the_page(Cause.UNKNOWN, capsys.readouterr().err, tmp_path)
    after = loop_of(framework, policy=load("default"))
    assert train(after, "default", range(12), store=tmp_path).step == 12
    assert after.faults.order == [7, 8, 9, 10, 11]


def test_the_line_about_an_exception_has_its_first_line(tmp_path, capsys):
    """Python prints the whole text below the line, with the traceback."""

    def fail(_: Any) -> None:
        try:
            jnp.matmul(jnp.ones((8, 1)), jnp.ones((2, 3)))
        except TypeError as error:
            error.args = (f"{error}\nfurther lines",)
            raise

    with pytest.raises(TypeError):
        train(
            loop_of("jax", policy=rules()), rules(), range(12), store=tmp_path, before=at(7, fail)
        )
    log = capsys.readouterr().err
    assert "step 7: the program raised TypeError: dot_general requires" in log
    assert "further lines" not in log
    (fault,) = events(tmp_path, "fault")
    assert fault["problem"].endswith("further lines")


class Breaking(torch.optim.SGD):
    """Its third step raises when half of the parameters are updated."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            for each in self.param_groups[0]["params"][:2]:
                each.data.add_(1.0)
            raise ZeroDivisionError("halfway")
        return super().step(closure)


@pytest.mark.parametrize(
    ("spoilt", "saved", "why"),
    [
        ("half updated", 0, "interrupted"),
        ("alarm", 5, "alarm"),
        ("weights", 5, "not finite"),
        ("donated", 5, "no checkpoint was saved at the end"),
        ("no rule", 5, "the program raised ZeroDivisionError"),
    ],
)
def test_a_state_that_may_be_spoilt_is_not_saved(spoilt, saved, why, tmp_path):
    """The next start would resume from weights that an exception left half updated, or from NaN."""
    answers = [] if spoilt == "no rule" else ANSWERS
    policy = load(with_answers(), respond=[{"to": ["nonfinite"], "do": ["skip"]}, *answers])
    framework = "jax" if spoilt == "donated" else "torch"
    loop = loop_of(framework, Faults(always=[8] if spoilt == "alarm" else []), policy)
    if spoilt == "half updated":
        assert isinstance(loop, TorchLoop)
        loop.optimizer = Breaking(loop.model.parameters(), lr=0.01)
        loop.state = {"model": loop.model, "optimizer": loop.optimizer}
        loop.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer)

    def fail(healer: Any) -> None:
        if spoilt == "weights":
            assert isinstance(loop, TorchLoop)
            loop.first.weight.data.fill_(math.nan)
        if spoilt == "donated":
            for leaf in jax.tree.leaves(healer.state):
                leaf.delete()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(loop, policy, range(12), store=tmp_path, before=at(9, fail))
    assert events(tmp_path, "save")[-1]["step"] == saved
    assert any(why in each.get("problem", "") for each in events(tmp_path))
    assert all("answer" not in each for each in events(tmp_path, "fault"))


QUICK = {"base_delay_s": 0.01, "max_delay_s": 0.02}


def get(url: str) -> str:
    return by_requests(url)


@BOTH_FRAMEWORKS
def test_the_call_is_repeated_and_not_the_run(framework, tmp_path, capsys):
    policy = load("default", retry=QUICK)
    loop = loop_of(framework, policy=policy)
    with serving(503, 429, 200) as server:

        def upload(healer, number):
            if number == 7:
                assert retrying(get, healer)(server.url) == "done"

        train(loop, policy, range(12), store=tmp_path, before=upload)
    assert loop.faults.order == list(range(12))
    faults = events(tmp_path, "fault")
    assert [(e["step"], e["sign"], e["attempt"], e["answer"]) for e in faults] == [
        (7, "HTTP 503", 1, "retry"),
        (7, "HTTP 429", 2, "retry"),
    ]
    assert all(0 < each["wait_s"] <= 0.02 for each in faults)
    assert {each["severity"] for each in faults} == {"warning"}, "the run goes on"
    assert_on_the_page(Cause.NETWORK, capsys.readouterr().err, tmp_path)


def test_the_advice_about_an_error_is_printed_once(tmp_path, capsys):
    """Up to the exception of the loop, which a program may catch."""
    policy = load("default", retry={**QUICK, "attempts": 3})
    text = "https://huggingface.co/" + "x" * 250

    def refuse() -> None:
        raise ConnectionResetError(text)

    loop = loop_of("torch")
    with pytest.raises(ConnectionResetError):
        train(loop, policy, range(9), before=at(7, lambda healer: retrying(refuse, healer)()))
    lines = capsys.readouterr().err.splitlines()
    failed, again, given_up, *rest = [line for line in lines if ": step 7: " in line]
    assert [line for line in lines if "what to check" in line] == [
        "healcore: what to check: docs/faults.md#api_error"
    ]
    assert "next attempt in" in failed
    assert len(failed) == 160
    assert "attempt 2" in again
    assert "attempt 3), gives up: ConnectionResetError" in given_up
    (raised,) = rest
    assert "the program raised ConnectionResetError" in raised


def test_a_signal_ends_a_wait_and_saves_the_step_that_was_done(tmp_path):
    policy = with_answers(retry={"base_delay_s": 3600.0, "max_delay_s": 3600.0})
    loop = loop_of("torch")

    def run(url):
        with Healer(policy, state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            for number in healer.batches(range(12)):
                loop.step(healer, number)
                if number == 7:
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                    retrying(by_requests, healer)(url)

    with serving(503) as server, pytest.raises(Terminated) as ended:
        run(server.url)
    assert ended.value.code == 128 + signal.SIGTERM
    assert events(tmp_path, "save")[-1]["step"] == 8
