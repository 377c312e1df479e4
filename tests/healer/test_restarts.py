"""What a start after a crash must know and do. All at once and with SIGKILL: test_killed.py."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Checkpoints, CheckpointStore, Healer
from healcore import policy as policies
from healcore.errors import IncompleteRun
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.run.checkpoints.saver import Saver
from healcore.runtime.run.ending.shutdown import Shutdown
from healcore.runtime.run.restore.program_state import ProgramState
from healcore.runtime.run.restore.rollback_restore import RollbackRestore
from healcore.runtime.store import files
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    EVERY_5,
    Faults,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
)
from tests.open_run import run_of

POINTS = [
    *((CheckpointStore, name) for name in ("restore", "replace_record")),
    *((Saver, name) for name in ("begin_attempt", "report_failures")),
    *((ProgramState, "load"), (LoaderRegistry, "rewind"), (files, "replace")),
]


class Crash(BaseException):
    """Stands for the kill: not caught, and no cleanup runs after it; see `crashing`."""


def end_without_log(end: Shutdown) -> None:
    """Ends a run as its process's death does, without a word in its log."""
    run = end.run
    run.saver.wait()
    run.end_requests.stop_signals.stop()
    run.driver.close()
    (claim,) = run.claims
    claim.release()
    assert end.error is None or isinstance(end.error, Crash)


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, at: int | None) -> Iterator[list[str]]:
    """Raises Crash before the `at`-th point within a rollback; counts them with None."""
    passed: list[str] = []
    inside = [False]
    restore = RollbackRestore.restore

    def watched(self: Any, *args: Any) -> Any:
        inside[0] = True
        result = restore(self, *args)
        inside[0] = False
        return result

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0] and len(passed) == at:
                inside[0] = False
                raise Crash(function.__qualname__)
            passed.extend([function.__qualname__] if inside[0] else [])
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(RollbackRestore, "restore", watched)
        for owner, name in POINTS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        # A killed process logs nothing at its end.
        patch.setattr(Shutdown, "close", end_without_log)
        yield passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "data", "distance"),
    [("torch", range, 1), ("torch", lambda count: iter(range(count)), 3), ("jax", range, 3)],
    ids=["torch", "data that only runs forward", "jax"],
)
def test_every_point_of_a_rollback(framework, data, distance, tmp_path, monkeypatch):
    def run(folder: str) -> tuple[dict[str, Any], list[Any]]:
        loop = loop_of(framework, Faults(always=[23, 26]), rules())
        facts = train(loop, rules(), data(40), store=tmp_path / folder)
        return {name: facts[name] for name in ("step", "rollbacks")}, loop.weights()

    with crashing(monkeypatch, None) as passed:
        expected, weights = run("clean")
    assert expected["rollbacks"] == 2
    first = len(passed) // 2
    assert passed[:first] == passed[first:]
    assert len({*passed}) == len(POINTS)
    for at in range(0, first, distance):
        with crashing(monkeypatch, at), pytest.raises(Crash):
            run(str(at))
        facts, after = run(str(at))
        assert facts == expected, passed[at]
        assert same(after, weights), passed[at]


def poisoned_run(
    policy: Any, *, shows: int, at: int = -1, until: int = -1, **options: Any
) -> dict[str, Any]:
    """Facts of a run to `until`: large weights from `at` on, and a loss of NaN from `shows` on."""
    loop = loop_of("torch")
    bias = loop.model[0].bias.data

    def before(healer: Any, number: int) -> None:
        if number == at and not healer.rollbacks:
            bias.add_(1e8)
        if number == until:
            run_of(healer).store.wait()
            raise RuntimeError("power")
        loop.faults.always = frozenset([number] if number >= shows and bias.max() > 1e6 else [])

    facts = train(loop, policy, before=before, **options)
    assert bias.max() < 1e6
    return facts


def test_a_checkpoint_whose_state_breaks_again_is_not_restored_twice(tmp_path):
    """Damaged at step 8, saved at step 10, broken off at step 11; no checkpoint is known-good."""
    policy = policies.load(rules(cut=False), rollback={"probation": 1000})
    options: dict[str, Any] = {"shows": 12, "data": range(30), "store": tmp_path}
    with pytest.raises(RuntimeError, match="power"):
        poisoned_run(policy, at=8, until=11, **options)
    assert poisoned_run(policy, **options)["rollbacks"] == 2
    assert [event["checkpoint"] for event in events(tmp_path, "rollback")] == [10, 0]


def test_skipped_batches_stay_skipped_in_every_later_process(tmp_path, monkeypatch):
    """Killed long after the first rollback; the second one goes past the first one's window."""
    faults = Faults(always=[13, 31])
    options = {"store": tmp_path}
    breaks_off(loop_of("torch", faults), rules(), range(50), at=27, **options)
    train(loop_of("torch", faults), rules(), range(50), **options)
    first, second = events(tmp_path, "rollback")
    assert second["checkpoint"] < first["onset"], "the test needs a deep one"
    assert faults.seen[13] == 1


@pytest.mark.slow
def test_damage_of_long_ago_is_left_behind(tmp_path):
    """The run goes back one checkpoint, then three, then five, ..."""
    deep = policies.load(rules(cut=False, recoveries=8), rollback={"deepen": 2})
    facts = poisoned_run(deep, at=10, shows=28, data=range(40), store=tmp_path, save_every=2)
    *before, last = [event["checkpoint"] for event in events(tmp_path, "rollback")]
    assert min(before) > 10 >= last, "only the last one was deep enough"
    assert len(events(tmp_path, "good")) > 8, "and the newest three had left it behind long since"
    assert facts["step"] > 28


LENGTH = 10


def start(framework, store, program, kill_at=None, faults=None):
    """Runs `program(healer, step)` in a new Healer; returns the batches. A kill saves nothing."""
    loop = loop_of(framework, faults, policy=rules())
    taken = []
    random.seed(0)
    torch.manual_seed(0)
    healer = Healer(rules(), state=loop.state, store=store, checkpoints=Checkpoints(every=4))

    def step(healer, batch):
        loop.step(healer, batch)
        taken.append(batch)
        if healer.step == kill_at:
            raise Crash

    healer.__enter__()
    try:
        program(healer, step)
    except Crash as crash:
        end_without_log(Shutdown(run_of(healer), crash))
    except ValueError as error:
        healer.__exit__(ValueError, error, None)
    else:
        healer.__exit__(None, None, None)
    return taken


class Drawing(dict):  # draws as its epoch begins, as a DataLoader does
    def __iter__(self):
        random.random()
        return super().__iter__()


@BOTH_FRAMEWORKS
@pytest.mark.parametrize(
    ("end", "first", "resumed", "left", "fresh"),
    [
        (17, 16, [1, 2], 0, False),
        pytest.param(17, 16, [1, 2], 0, True, marks=pytest.mark.slow),
        (22, 21, [2], 0, False),
        pytest.param(22, 21, [2], 0, True, marks=pytest.mark.slow),
        ("after 1", 20, [1, 2], 0, False),
        pytest.param("after 1", 20, [1, 2], 0, True, marks=pytest.mark.slow),
        ("before 2", 20, [2], 0, True),
        pytest.param("before 2", 20, [2], 0, False, marks=pytest.mark.slow),
        (22, 20, [2], 2, True),
        pytest.param(22, 20, [2], 2, False, marks=pytest.mark.slow),
        ("fails within 1", 20, [1, 2], 0, False),
        pytest.param("fails within 1", 20, [1, 2], 0, True, marks=pytest.mark.slow),
        ("fails before 2", 20, [2], 0, True),
        pytest.param("fails before 2", 20, [2], 0, False, marks=pytest.mark.slow),
    ],
)
def test_epochs_continue_after_a_kill(framework, end, first, resumed, left, fresh, tmp_path):
    """A save at an epoch's end waits for the next step, or after a `break` for the next epoch."""
    if framework == "jax":  # `update` saves before the `break`
        first += left // 2
        left = 0
    loader = list(range(LENGTH + left))
    epochs = []
    ended = []

    def program(healer, step, end=None):
        def saves(here):
            if end == f"fails {here}":
                raise ValueError
            if here == end:
                healer.save()
                raise Crash

        for epoch in healer.epochs(3):
            epochs.append(epoch)
            saves(f"before {epoch}")
            new = Drawing.fromkeys(loader) if fresh and not left else loader
            batches = healer.batches(new, epoch=epoch).with_state()
            assert (len(batches), batches.healer) == (len(loader), healer)
            if new is not loader:
                batches.mixup = epoch
                assert vars(new) == {"mixup": batches.mixup}
            for batch, _ in batches:
                step(healer, batch)
                if left and batch == LENGTH - 1:
                    break
            saves(f"after {epoch}")
            ended.append((healer.step, random.random(), float(torch.rand(()))))  # an evaluation
            saves(f"within {epoch}")

    start(framework, tmp_path / "undisturbed", program)
    start(framework, tmp_path / "killed", program, 12)
    start(framework, tmp_path / "killed", lambda healer, step: program(healer, step, end), end)
    before = len(epochs), len(ended)
    taken = start(framework, tmp_path / "killed", program)
    assert (epochs[before[0] :], ended[before[1] :]) == (resumed, ended[resumed[0] : 3])
    assert taken == [i % LENGTH for i in range(first, 3 * LENGTH)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "epochs", "range"])
@pytest.mark.parametrize("kill_at", [7, 17, 20])
def test_an_order_that_the_program_draws_is_the_same_after_a_kill(kind, kill_at, tmp_path):
    ended = []

    def program(healer, step):
        order = torch.randperm(LENGTH).tolist()
        for epoch in healer.epochs(3) if kind == "epochs" else range(3):
            order = order if kind == "block" else torch.randperm(LENGTH).tolist()
            for batch in healer.batches(order, epoch=epoch if kind == "epochs" else None):
                step(healer, batch)
        ended.append(healer.state["model"][0].bias)

    whole = start("torch", tmp_path / "whole", program)
    for end in (kill_at, kill_at + 3, None):
        rest = start("torch", tmp_path / "killed", program, end)
    assert rest == whole[-len(rest) :]
    assert torch.equal(*ended)


@pytest.mark.slow
def test_no_update_on_a_batch_is_lost(tmp_path):
    """A resume in the middle of a batch would leave out its other updates."""

    def program(healer, step):
        for batch in healer.batches(range(8)):
            for _ in range(3):
                step(healer, batch)

    start("jax", tmp_path, program, 17)
    assert start("jax", tmp_path, program) == [batch for batch in range(4, 8) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batches", "steps", "epochs"])
def test_an_evaluation_is_whole_after_a_kill_and_no_checkpoint_has_its_weights(kind, tmp_path):
    """The evaluations of earlier epochs, which a restart repeats, draw random numbers."""
    validation = list(range(100, 103))
    ended = []

    def epochs(healer):
        for first in range(0, 40, 8):
            yield from healer.batches(range(first, first + 8))
            assert len(list(healer.batches(DataLoader(range(3))))) == 3  # type: ignore[arg-type]

    def program(healer, step):
        bias = healer.state["model"][0].bias.data
        loops = {"batches": lambda: healer.batches(range(40)), "steps": lambda: healer.steps(40)}
        for number in loops.get(kind, lambda: epochs(healer))():
            assert healer.step == number
            step(healer, number)
            if kind != "epochs" and healer.step % 4 == 0:
                trained = bias.clone()
                bias.zero_()
                assert len(list(healer.batches(validation))) == 3
                next(healer.batches(validation))  # a `break` ends it
                bias.copy_(trained)
        ended.append(bias)

    for store, kill_at in ("whole", None), ("killed", 22), ("killed", None):
        taken = start("torch", tmp_path / store, program, kill_at)
    assert taken == [*range(20, 40)]
    assert torch.equal(*ended)


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("kind", ["steps", "warm", "own count", "rest of the data"])
def test_a_loop_with_its_own_count_is_refused_after_the_program_has_loaded_its_own_snapshot(
    kind, framework, tmp_path
):
    """The snapshot is newer than the checkpoint. A warm optimizer at each start is no snapshot."""

    def run(*, snapshot: bool) -> list[int]:
        first = 19 if snapshot or kind == "warm" else 0
        loop = loop_of(framework, Faults(), rules())
        for number in range(first):
            loop.step(None, number)
        with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            rest = healer.steps(20) if kind in ("steps", "warm") else range(first, 20)
            for number in healer.batches(list(rest)) if kind == "rest of the data" else rest:
                if number == 18 and not snapshot:
                    raise Crash
                loop.step(healer, number)
                healer.after_step()
        return loop.faults.order[first:]

    with pytest.raises(Crash):
        run(snapshot=False)
    wrong = pytest.raises(IncompleteRun, match=r"checkpoint 18 replaces|ended without a step")
    with nullcontext() if kind in ("steps", "warm") else wrong:
        assert run(snapshot=True) == [18, 19]
    assert len(events(tmp_path, "problem")) == (kind != "warm")


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_dictionary_of_the_state_may_grow(store, tmp_path):
    """A rollback to before its first entry empties the dictionary, and a restart fills it."""
    for last in (30, 99) if store == "disk" else (99,):
        loop = loop_of("torch", Faults(once=[23]))
        best: dict[str, Any] = {}
        lengths: list[int] = []
        loop.state["best"] = best

        def before(_, number, loop=loop, best=best, lengths=lengths, last=last):
            lengths.append(len(best))
            if number == 22:
                best["bias"] = loop.model[0].bias.detach().clone()
            if number == last:
                raise RuntimeError("power")

        with pytest.raises(RuntimeError, match="power") if last == 30 else nullcontext():
            where = tmp_path if store == "disk" else None
            train(loop, rules(), range(40), store=where, before=before)
        if len(lengths) > 23:
            assert lengths[22:24] == [0, 1]
            assert 0 in lengths[24:], "the rollback has emptied it"
        else:
            assert lengths[0] == 1, "the restart has filled it"


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_numbers_continue_after_a_rollback_and_after_a_kill(kind, framework, tmp_path):
    """An epoch may be one step without `batches`."""
    numbers = []

    def program(healer, step):
        for number in getattr(healer, kind)(30):
            numbers.append(number)
            assert healer.step == number
            step(healer, number)

    start(framework, tmp_path, program, 17, faults=Faults(once=[13]))
    (rollback,) = events(tmp_path, "rollback")
    first = numbers.index(rollback["checkpoint"], 13)
    assert numbers == [*range(first), *range(rollback["checkpoint"], 17)]
    assert start(framework, tmp_path, program) == [*range(16, 30)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError, "steps"),
        (SystemExit, "epochs"),
        pytest.param(ValueError, "epochs", marks=pytest.mark.slow),
        pytest.param(SystemExit, "steps", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("end", [(0, 9), (7, 0), (7, 1), (7, 9)])
def test_an_exception_in_a_body_without_batches(kind, error, end, tmp_path):
    """Before the update, within it, or (9) after it."""

    def run(store, end=None):
        new_process()
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=3)
        state = {"weight": weight, "optimizer": optimizer}
        with Healer("default", state=state, store=tmp_path / store) as healer:
            for number in getattr(healer, kind)(12):
                evaluations = iter([(number, 0), (number, 1)])

                def closure(evaluations=evaluations):
                    optimizer.zero_grad()
                    if next(evaluations, 0) == end:
                        raise error
                    loss = weight.pow(4).sum()
                    healer.observe(loss)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                if (number, 9) == end:
                    raise error
        return weight

    with pytest.raises(error):
        run("left", end)
    assert torch.equal(run("left"), run("whole"))


@pytest.mark.parametrize(("passes", "completed"), [(2, True), (1, False)])
def test_a_kill_after_the_last_step_of_a_loop_of_epochs(passes, completed, tmp_path):
    """The next start trains nothing, and is complete if it repeats all passes from epoch 0 on."""
    loader = list(range(12))  # a checkpoint at the last step of each epoch

    def program(healer, step, passes=passes, end=None):
        for _ in range(passes):
            for batch in healer.batches(loader):
                step(healer, batch)
        if end:
            raise end

    start("torch", tmp_path, lambda healer, step: program(healer, step, 2, Crash))
    with nullcontext() if completed else pytest.raises(IncompleteRun):
        assert start("torch", tmp_path, program) == []
