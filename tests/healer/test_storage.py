"""What a run finds in its directory at a start, and disk faults while it runs."""

import logging
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from healcore import Healer, Keep
from healcore import policy as policies
from healcore.errors import StateMismatch
from healcore.jax import protect
from healcore.runtime.run.checkpoints import schedule
from healcore.runtime.run.ending.exits import LastStateNotSaved
from healcore.runtime.run.start import StoreNotEmpty
from healcore.runtime.store.checkpoints import NoGoodCheckpoint
from healcore.runtime.store.manifest import step_of
from healcore.torch.store import DCPStore
from tests import forked_programs
from tests.healer.run_directory import (
    events,
    events_of,
    flip_a_bit,
    new_process,
    postmortems,
    remove_a_file,
)
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    SKIPS,
    Faults,
    at,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
)
from tests.open_run import run_of
from tests.runtime.store.disk_faults import before_completion


def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    full, tried = [], []

    def fails(checkpoint):
        tried.append(step_of(checkpoint))
        if full == [True] or (tried[-1] == 40 and tried.count(40) == 1):
            raise OSError(28, "No space left on device")

    before_completion(monkeypatch, fails)
    loop = loop_of("torch", Faults(always=[30]))

    def fill(healer: Any, number: int) -> None:
        full[:] = [18 <= number < 28]

    assert train(loop, rules(), range(41), store=tmp_path, before=fill).step == 40
    assert tried.count(40) == 2
    failed = events(tmp_path, "save_failed")
    assert failed[0]["step"] in (15, 20), "a slow disk may still be at the one before"
    assert "No space left" in failed[0]["problem"]


def test_the_last_line_names_only_what_is_on_disk(tmp_path, monkeypatch, caplog):
    """The disk is full from the save of step 15 on. A copy in memory is gone with the process."""

    def fails(checkpoint: Path) -> None:
        if (step_of(checkpoint) or 0) >= 15:
            raise OSError(28, "No space left on device")

    before_completion(monkeypatch, fails)
    policy = policies.load("default", rollback={"probation": 5})
    with (
        caplog.at_level(logging.WARNING, logger="healcore"),
        pytest.raises(LastStateNotSaved),
    ):
        train(loop_of("torch"), policy, range(40), store=tmp_path)
    (last_line,) = [each for each in caplog.messages if each.startswith("ended by")]
    assert last_line.endswith("; checkpoint 10 is on disk; newest known-good checkpoint: step 10")
    assert events(tmp_path, "end")[-1]["last_good"] == 10
    failed = [each["step"] for each in events(tmp_path, "save_failed")]
    assert sorted(set(failed)) == [15, 20, 25, 30, 35, 40]
    for step in failed:
        assert any(f"checkpoint {step} was not saved" in each for each in caplog.messages), step


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 5])
def test_saves_take_a_small_share_of_the_time_unless_their_distance_is_given(
    tmp_path, monkeypatch, caplog, every
):
    """By a clock of the test: a step takes a second, and a save takes eight."""
    now = [0.0]
    save = DCPStore.save

    def slow(store, *args, **options):
        now[0] += 8.0
        save(store, *args, **options)

    def tick(healer, number):
        now[0] += 1.0

    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(DCPStore, "save", slow)
    options = {"store": tmp_path, "before": tick, "save_every": every}
    train(loop_of("torch"), rules(), range(40 if every else 900), **options)
    saved = [each["step"] for each in events(tmp_path, "save") if each["why"] == "regular"]
    if every:
        assert saved == list(range(5, 41, 5))
        return
    assert saved == [4, 8, 576]
    assert "saves of more than 1 % of the time (Checkpoints(every=N)" in caplog.text


def test_a_shard_of_nan_costs_no_checkpoint(tmp_path):
    """Whatever the comparisons of weights have learnt of its losses is in each record."""
    loop = loop_of("torch", Faults(always=range(120, 320)))

    def loss_fn(number: Any) -> torch.Tensor:
        inputs, targets = map(torch.from_numpy, loop.faults.batch(int(number)))
        return (loop.model(inputs) - targets).square().mean()

    train(loop, "default", range(450), store=tmp_path, loss_fn=loss_fn, save_every=50)
    assert events(tmp_path, "save_failed") == []
    assert DCPStore(tmp_path).steps_on_disk()[-1] == 450


def test_a_state_that_becomes_unsavable_costs_checkpoints_and_not_the_run(tmp_path):
    loop = loop_of("torch")
    extra = []
    spoil = at(12, lambda healer: extra.append(lambda: None))
    loop.state["extra"] = SimpleNamespace(
        state_dict=lambda: {"extra": list(extra)}, load_state_dict=lambda state: None
    )
    with pytest.raises(LastStateNotSaved, match=r"at step 30.*newest checkpoint"):
        train(loop, rules(), range(30), store=tmp_path, before=spoil)
    assert "no plain form" in events(tmp_path, "save_failed")[0]["problem"]
    assert "not saved" in postmortems(tmp_path)[0]["diagnosis"]


def test_a_completed_store_is_of_one_run_which_may_go_on(tmp_path):
    """The store does not give its weights to another run."""

    def run(seed: int, **options: Any) -> int:
        loop = loop_of("torch")
        torch.manual_seed(seed)
        for each in loop.model.parameters():
            torch.nn.init.normal_(each)
        return train(loop, rules(), range(12), store=tmp_path, **options).step

    run(0)
    for seed in (1, 0):  # a fold, and the same run again
        with pytest.raises(StoreNotEmpty, match=r"this process has completed.*runs/{fold}"):
            run(seed)
    new_process()
    with pytest.raises(StoreNotEmpty, match=r"began with other weights.*loads its own snapshot"):
        run(1)
    assert run(0) == 12
    new_process()
    with pytest.raises(StoreNotEmpty, match="up to step 12"):
        run(0, resume=False)
    assert run(0, resume=True, epochs=2) == 24


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that broke off at step 22, with checkpoints up to step 20."""
    folder = tmp_path_factory.mktemp("killed")
    breaks_off(loop_of("torch"), rules(), range(40), store=folder, at=22)
    return folder


def copy_of(killed: Path, folder: Path) -> list[Path]:
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    return sorted(folder.glob("step-*"))


RESTART = """
import sys
import healcore
from tests.healer.training_loops import loop_of
state = loop_of("torch").state
if sys.argv[1] == "block":
    with healcore.Healer(state=state, store=sys.argv[2]):
        print("trains")
else:
    healcore.start(state=state, store=sys.argv[2])
    print("trains")
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["block", "start"])
def test_a_start_without_an_intact_checkpoint_ends_with_a_message(form, killed, tmp_path):
    copy_of(killed, tmp_path)
    kept = {}
    for path in tmp_path.glob("step-*/**/*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
            kept[path] = path.read_bytes()
    done = forked_programs.run("-c", RESTART, form, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"healcore: {tmp_path} holds an earlier run, and none of its")
    assert "step 20 (damaged: " in line
    assert "No checkpoint was changed or deleted. Restore an intact copy; or begin a new" in line
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.parametrize("listed", [True, False])
def test_every_checkpoint_damaged_is_refused(listed, killed, tmp_path):
    before = copy_of(killed, tmp_path)
    for each in before:
        if listed:
            flip_a_bit(each, 0)  # only reading the whole checkpoint shows it
        else:
            remove_a_file(each)
    loop = loop_of("torch")
    with pytest.raises(NoGoodCheckpoint, match="damaged"):
        train(loop, rules(), range(40), store=tmp_path)
    assert len(events(tmp_path, "end")) == 2
    assert loop.faults.order == []
    assert sorted(tmp_path.glob("step-*")) == before, "nothing is deleted"


def test_damaged_checkpoints_are_named_and_the_newest_intact_one_is_used(killed, tmp_path, caplog):
    *_, second, newest = copy_of(killed, tmp_path)
    flip_a_bit(second, 0)
    remove_a_file(newest)
    loop = loop_of("torch")
    with caplog.at_level(logging.INFO, "healcore"):
        result = train(loop, rules(), range(40), store=tmp_path)
    assert result.step == 40
    assert loop.faults.order[0] == 10
    assert sorted(event["step"] for event in events(tmp_path, "damaged")) == [15, 20]
    (line,) = [r.getMessage() for r in caplog.records if "this start begins" in r.getMessage()]
    assert "begins at step 10: 10 steps are lost and trained again; checkpoint 15 (" in line
    assert line.count("damaged") == 2


def starts_with_lines(caplog: pytest.LogCaptureFixture, folder: Path) -> tuple[int, list[str]]:
    """The first batch of a start, and the lines of the start about missing checkpoints."""
    caplog.clear()
    new_process()
    loop = loop_of("torch")
    with caplog.at_level(logging.INFO, "healcore"):
        train(loop, rules(), range(40), store=folder)
    lines = [line for line in caplog.messages if "missing" in line]
    return (loop.faults.order or [40])[0], lines


@pytest.mark.parametrize("more", [0, 1])
def test_a_newest_checkpoint_that_was_deleted_by_hand_is_named(more, killed, tmp_path, caplog):
    *_, before, newest = copy_of(killed, tmp_path)
    shutil.rmtree(newest)
    if more:
        shutil.rmtree(before)
    resumed = 15 - 5 * more
    first, (line,) = starts_with_lines(caplog, tmp_path)
    assert first == resumed
    assert f"this start begins at step {resumed}: {20 - resumed} steps are lost" in line
    assert "20 (missing" in line
    assert starts_with_lines(caplog, tmp_path) == (40, []), "the run has passed it"


def test_a_deleted_end_of_a_completed_run_is_named(tmp_path, caplog):
    train(loop_of("torch"), rules(), range(40), store=tmp_path)
    assert starts_with_lines(caplog, tmp_path) == (40, [])
    shutil.rmtree(sorted(tmp_path.glob("step-*"))[-1])
    first, (line,) = starts_with_lines(caplog, tmp_path)
    assert first == 35
    assert "40 (missing" in line
    assert "begins at step 35: 5 steps are lost" in line


def test_a_run_whose_checkpoints_were_all_deleted_says_that_it_begins_again(
    killed, tmp_path, caplog
):
    for each in copy_of(killed, tmp_path):
        shutil.rmtree(each)
    first, (line,) = starts_with_lines(caplog, tmp_path)
    assert first == 0
    assert "20 (missing" in line
    assert "begins at step 0: 20 steps are lost" in line
    assert starts_with_lines(caplog, tmp_path) == (40, [])


def test_checkpoints_that_a_rollback_has_abandoned_are_not_missed(tmp_path, caplog):
    """The rollback of step 37 goes back to 30, and the run breaks off before the next save."""
    loop = loop_of("torch", Faults(always=[37]))

    def end(healer: Any, number: int) -> None:
        if healer.rollbacks and healer.step == 33:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop, rules(), range(60), store=tmp_path, before=end)
    assert events(tmp_path, "rollback")
    assert starts_with_lines(caplog, tmp_path)[1] == []


def test_no_checkpoint_is_deleted_that_is_newer_than_the_resumed(tmp_path: Path):
    run = {"store": tmp_path, "keep": Keep(good=2, candidates=9, older=True)}
    breaks_off(loop_of("torch"), rules(), range(60), at=45, **run)
    newest = sorted(tmp_path.glob("step-*"))[-3:]
    for folder in newest:
        flip_a_bit(folder, 1)
    again = loop_of("torch")
    train(again, rules(), range(60), save_every=11, **run)
    assert again.faults.order[0] < int(newest[0].name.split("-")[1].split(".")[0])
    assert all(folder.is_dir() for folder in newest)


@BOTH_FRAMEWORKS
def test_memory_has_what_a_rollback_needs_when_the_directory_was_deleted(framework, tmp_path):
    """The events are kept somewhere else. The disk is still gone at the end: no status 0."""
    weights: list[Any] = []
    for folder in (tmp_path / "healthy", tmp_path / "deleted"):
        loop = loop_of(framework, Faults(always=[23]), rules())

        def before(healer: Any, number: int, folder: Path = folder) -> None:
            if number == 22 and folder.name == "deleted" and not healer.rollbacks:
                run_of(healer).store.wait()
                shutil.rmtree(folder)

        log = folder.with_suffix(".jsonl")
        with nullcontext() if folder.name == "healthy" else pytest.raises(LastStateNotSaved):
            train(loop, rules(), range(40), store=folder, events=log, before=before)
        weights.append(loop.weights())
    assert same(*weights)
    found = events_of(log)
    assert [each["checkpoint"] for each in found if each["kind"] == "rollback"] == [15]
    problems = " ".join(each.get("problem", "") for each in found)
    assert re.search("cannot be read.* in memory", problems)
    assert "No such file" in problems


def fit(
    folder: Path, *, lr: float = 0.01, batch: int = 2, policy: Any = SKIPS, **more: Any
) -> float:
    """Trains on 20 batches, and returns the learning rate at the end."""
    loop = type("Loop", (type(loop_of("torch")),), {"rate": lr})()
    rows: Any = list(range(20 * batch))
    batches = BatchSampler(rows, batch, drop_last=False)  # as Accelerate: batch_size is None
    data = DataLoader(rows, batch_sampler=batches, collate_fn=lambda numbers: numbers[0])
    train(loop, policy, data, store=folder, **more)
    return loop.optimizer.param_groups[0]["lr"]


def warned(folder: Path) -> list[str]:
    return [event["problem"] for event in events(folder, "problem")]


def test_an_interrupted_run_that_is_given_another_learning_rate_says_which_holds(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, before=at(16, lambda _: 1 / 0))
    assert fit(tmp_path, lr=0.5, batch=4, policy="default") < 0.01
    lines = "\n".join(warned(tmp_path))
    assert "optimizer.lr: 0.01 -> 0.5" in lines
    assert "policy: 'skips (" in lines
    assert "-> 'default (" in lines
    notes = [event["why"] for event in events(tmp_path, "note")]
    (note,) = [each for each in notes if "batch size: 2 -> 4" in each]
    assert "empty directory" in note
    assert "restart their warm-up" in lines


@pytest.mark.slow
def test_changed_hyperparameters_of_a_jax_state_are_named(tmp_path: Path):
    def run(lr: float, steps: int) -> None:
        new_process()
        tx = protect(optax.inject_hyperparams(optax.adam)(learning_rate=lr), SKIPS)
        params = jnp.ones(3)
        state: Any = (params, tx.init(params))
        with Healer(SKIPS, state=state, store=tmp_path) as healer:
            for _ in healer.batches(list(range(6))):
                params, inner = healer.state
                updates, inner = tx.update(params, inner, params, value=jnp.sum(params))
                healer.update((optax.apply_updates(params, updates), inner))
                if healer.step == steps:
                    raise KeyboardInterrupt

    for steps in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            run(0.001, steps)
    assert warned(tmp_path) == []
    run(0.5, 10)
    assert ["learning_rate: 0.001 -> 0.5" in each for each in warned(tmp_path)] == [True]
    with pytest.raises(StoreNotEmpty, match=r"learning_rate: 0\.001 -> 0\.5.*Nothing was trained"):
        run(0.5, 10)


def shape_of(loop: Any, kind: str) -> None:
    """Changes the parameters of a loop, as a program that unfreezes or grows layers does."""
    if kind == "more":
        loop.model.append(torch.nn.Linear(1, 1))
        loop.optimizer.add_param_group({"params": [*loop.model[-1].parameters()]})
    if kind == "wider":
        loop.model[0], loop.model[3] = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
        loop.optimizer.state.clear()
        loop.optimizer.param_groups[0]["params"] = [*loop.model.parameters()]


@pytest.mark.parametrize("kind", ["more", "wider"])
def test_a_start_does_not_fall_back_past_a_checkpoint_that_does_not_fit(kind: str, tmp_path: Path):
    def start(until: int, *, changed: bool = False) -> None:
        loop = loop_of("torch")
        loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1000)
        loop.state["scheduler"] = loop.scheduler
        if changed:
            shape_of(loop, kind)

        def before(healer: Healer, number: int) -> None:
            resumed.append(number)
            if number == 20 and not changed:
                shape_of(loop, kind)
            assert number != until, "power"

        train(loop, rules(), range(60), store=tmp_path, before=before)

    resumed: list[int] = []
    with pytest.raises(AssertionError, match="power"):
        start(45)
    written = {each.name for each in tmp_path.glob("step-*")}
    with pytest.raises(StateMismatch, match="step 45 in "):
        start(60)
    with pytest.raises(AssertionError, match="power"):
        start(46, changed=True)
    assert resumed[-2:] == [45, 46]
    assert {each.name for each in tmp_path.glob("step-*")} >= written
