"""Faults of whole runs: unreadable batches, exceptions within a step, network calls."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Healer, retrying
from healcore.errors import Terminated
from healcore.policy import load, to_dict
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import EVERY_5, Faults, loop_of, rules, train
from tests.runtime.faults.local_server import by_requests, serving

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])

ANSWERS = [
    {"to": ["data"], "do": ["skip_batch"]},
    {"to": ["network"], "do": ["retry"]},
    {"to": ["unknown"], "do": ["save"]},
]


def with_answers(**more: Any) -> Any:
    """The policy of the other tests, which also answers faults."""
    policy = rules()
    return load(policy, respond=[*to_dict(policy)["respond"], *ANSWERS], **more)


class Corrupt(Dataset):
    """Batch numbers, some of which cannot be read."""

    def __init__(self, count: int, bad: Iterable[int]) -> None:
        self.count, self.bad, self.read = count, frozenset(bad), []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        self.read.append(index)
        if index in self.bad:
            raise ValueError(f"sample {index} is no image")
        return index


def loader(count: int, bad: Iterable[int]) -> DataLoader:
    return DataLoader(Corrupt(count, bad), batch_size=None)


# -- data -----------------------------------------------------------------------------------------


class Dies(Dataset):
    """The worker that reads row 7 dies."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            time.sleep(1)  # the loop waits for this row, so that the exception is raised there
            os.kill(os.getpid(), self.by) if self.by else os._exit(3)
        return torch.tensor(index)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGBUS, 0])
def test_a_worker_that_dies_is_no_network_failure_and_no_unreadable_batch(kind, by, tmp_path):
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


@BOTH
def test_an_unreadable_batch_is_left_out_and_logged(framework, tmp_path):
    policy = with_answers()
    loop = loop_of(framework, policy=policy)
    facts = train(loop, policy, loader(20, [5, 11, 12]), store=tmp_path)
    assert loop.faults.order == [n for n in range(20) if n not in (5, 11, 12)]
    assert facts["step"] == 17
    faults = events(tmp_path, "fault")
    assert [each["batches"] for each in faults] == [[[0, 5]], [[0, 11]], [[0, 12]]]
    assert {each["answer"] for each in faults} == {"skip_batch"}
    assert "batch 5 of epoch 0 (rows 5) cannot be read: ValueError" in faults[0]["problem"]


@pytest.mark.parametrize(
    ("bad", "limits", "last"),
    [
        ([4, 5, 6, 7], {}, 7),
        (range(2, 20, 2), {"consecutive": 1, "count": 3}, 8),
        (range(2, 20, 2), {"consecutive": 1, "count": 3, "within": 6}, None),
    ],
)
def test_beyond_the_limits_the_error_ends_the_run(bad, limits, last, tmp_path):
    ends = last is not None
    match = f"sample {last} is no image"
    with pytest.raises(ValueError, match=match) if ends else contextlib.nullcontext() as raised:
        policy = with_answers(skip_batch=limits)
        train(loop_of("torch"), policy, loader(20, bad), store=tmp_path)
    (found,) = postmortems(tmp_path)
    assert ("ValueError" in (found["exception"] or "")) == ends
    if raised is not None:
        assert any("the limit of [skip_batch]" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("data", [Corrupt, loader])
def test_it_stays_left_out_after_a_rollback_and_a_restart(data, tmp_path):
    """Also by a loader that cannot be rewound, which reads it again to come to where it was."""
    policy = with_answers()

    def stop(healer, number):
        if number == 24:
            os.kill(os.getpid(), signal.SIGTERM)

    loop = loop_of("torch", Faults(always=[18]))
    with pytest.raises(Terminated):
        train(loop, policy, data(30, [12]), store=tmp_path, before=stop)
    assert len(events(tmp_path, "rollback")) == 1
    after = loop_of("torch")
    train(after, policy, data(30, [12]), store=tmp_path)
    assert after.faults.order == [25, 26, 27, 28, 29]
    assert len(events(tmp_path, "fault")) == 1
    assert 12 not in {*loop.faults.order, *after.faults.order}


# -- exceptions of the loop -----------------------------------------------------------------------


def fails_at(batch: int, spoil: Any = lambda healer: None) -> Any:
    """A `before` that raises at a batch, after it has spoilt something."""

    def before(healer: Any, number: int) -> None:
        if number == batch:
            spoil(healer)
            raise ZeroDivisionError("mine")

    return before


@BOTH
def test_a_checkpoint_before_an_exception_within_the_step_ends_the_run(framework, tmp_path):
    policy = with_answers()
    loop = loop_of(framework, policy=policy)
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(loop, policy, range(12), store=tmp_path, before=fails_at(7))
    save = events(tmp_path, "save")[-1]
    assert (save["step"], save["why"]) == (7, "emergency")
    (fault,) = events(tmp_path, "fault")
    assert (fault["cause"], fault["answer"]) == (["UNKNOWN"], "save")
    assert events(tmp_path, "skipped_batches") == []
    after = loop_of(framework, policy=policy)
    assert train(after, policy, range(12), store=tmp_path)["step"] == 12
    assert after.faults.order == [7, 8, 9, 10, 11]


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


def test_a_half_updated_state_is_not_saved(tmp_path):
    loop = loop_of("torch")
    loop.optimizer = Breaking(loop.model.parameters(), lr=0.01)
    loop.state = {"model": loop.model, "optimizer": loop.optimizer}
    loop.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer)
    with pytest.raises(ZeroDivisionError):
        train(loop, with_answers(), range(12), store=tmp_path)
    assert [each["step"] for each in events(tmp_path, "save")] == [0]
    assert any("interrupted" in each["problem"] for each in events(tmp_path, "problem"))


@pytest.mark.parametrize("why", ["alarm", "not finite"])
def test_nor_a_state_after_an_alarm_or_with_nan(why, tmp_path):
    skips = load(with_answers(), respond=[{"to": ["nonfinite"], "do": ["skip"]}, *ANSWERS])
    loop = loop_of("torch", Faults(always=[8] if why == "alarm" else []))
    spoil = lambda healer: why == "alarm" or loop.model[0].weight.data.fill_(math.nan)  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        train(loop, skips, range(12), store=tmp_path, before=fails_at(9, spoil))
    assert events(tmp_path, "save")[-1]["step"] == 5
    assert any(why in each["problem"] for each in events(tmp_path, "problem"))


def test_a_state_that_a_failed_step_has_donated_cannot_be_saved(tmp_path):
    policy = with_answers()
    loop = loop_of("jax", policy=policy)
    donate = lambda healer: [leaf.delete() for leaf in jax.tree.leaves(healer.state)]  # noqa: E731
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(loop, policy, range(12), store=tmp_path, before=fails_at(7, donate))
    (fault,) = events(tmp_path, "fault")
    assert "answer" not in fault
    assert any("no checkpoint was saved" in each["problem"] for each in events(tmp_path, "problem"))
    after = loop_of("jax", policy=policy)
    train(after, policy, range(12), store=tmp_path)
    assert after.faults.order == [5, 6, 7, 8, 9, 10, 11]


# -- network --------------------------------------------------------------------------------------


QUICK = {"base_delay_s": 0.01, "max_delay_s": 0.02}


@BOTH
def test_the_call_is_repeated_and_not_the_run(framework, tmp_path):
    policy = with_answers(retry=QUICK)
    loop = loop_of(framework, policy=policy)
    with serving(503, 429, 200) as server:

        def upload(healer, number):
            if number == 7:
                assert retrying(by_requests, healer)(server.url) == "done"

        train(loop, policy, range(12), store=tmp_path, before=upload)
    assert loop.faults.order == list(range(12))
    faults = events(tmp_path, "fault")
    assert [(e["step"], e["sign"], e["attempt"], e["answer"]) for e in faults] == [
        (7, "HTTP 503", 1, "retry"),
        (7, "HTTP 429", 2, "retry"),
    ]
    assert all(0 < each["wait_s"] <= 0.02 for each in faults)
    (done,) = events(tmp_path, "retried")
    assert (done["step"], done["attempt"]) == (7, 3)


def test_a_signal_ends_a_wait_and_saves_the_step_that_was_done(tmp_path):
    policy = with_answers(retry={"base_delay_s": 60.0})
    loop, began = loop_of("torch"), time.monotonic()

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
    assert time.monotonic() - began < 30
    assert events(tmp_path, "save")[-1]["step"] == 8
    after = loop_of("torch")
    train(after, policy, range(12), store=tmp_path)
    assert after.faults.order == [8, 9, 10, 11]
