"""Each form of a training loop continues after a kill where it was."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Checkpoints, Healer
from healcore.errors import IncompleteRun
from tests.healer.run_directory import events, new_process
from tests.healer.simulated_kills import Crash, end_without_log
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules
from tests.open_run import run_of

SAVE_EVERY = 4
EPOCHS, LENGTH = 3, 10
"""Epochs of a run, and steps of an epoch. No epoch but the last ends at a regular checkpoint."""

Step = Callable[[Healer, Any], None]
Program = Callable[[Healer, Step], None]


def start(
    framework: str,
    store: Path,
    program: Program,
    *,
    kill_at: int | None = None,
    faults: Faults | None = None,
    save_every: int = SAVE_EVERY,
) -> list[Any]:
    """Runs `program(healer, step)` in a new Healer; returns the batches that it has trained on.

    The process is killed when it has done the step `kill_at`. A kill saves nothing.
    """
    loop = loop_of(framework, faults, policy=rules())
    taken: list[Any] = []
    random.seed(0)
    torch.manual_seed(0)
    checkpoints = Checkpoints(every=save_every)
    healer = Healer(rules(), state=loop.state, store=store, checkpoints=checkpoints)

    def step(healer: Healer, batch: Any) -> None:
        loop.step(healer, batch)
        taken.append(batch)
        if healer.step == kill_at:
            raise Crash

    healer.__enter__()
    try:
        program(healer, step)
    except Crash as crash:
        end_without_log(run_of(healer), crash)
    except ValueError as error:
        healer.__exit__(ValueError, error, None)
    else:
        healer.__exit__(None, None, None)
    return taken


# -- epochs ----------------------------------------------------------------------------------------


class DrawingLoader(dict[int, None]):
    """Draws a random number as its epoch begins, as a DataLoader does."""

    def __iter__(self) -> Iterator[int]:
        random.random()
        return super().__iter__()


def never(healer: Healer, place: str) -> None:
    """Interrupts no epoch."""


def save(at: str) -> Callable[[Healer, str], None]:
    """A save at a place between two epochs."""

    def interrupt(healer: Healer, place: str) -> None:
        if place == at:
            healer.save()

    return interrupt


def save_and_die(at: str) -> Callable[[Healer, str], None]:
    """A kill at a place between two epochs, after a save there."""

    def interrupt(healer: Healer, place: str) -> None:
        if place == at:
            healer.save()
            raise Crash

    return interrupt


def fail(at: str) -> Callable[[Healer, str], None]:
    """An exception at a place between two epochs."""

    def interrupt(healer: Healer, place: str) -> None:
        if place == at:
            raise ValueError(at)

    return interrupt


class EpochProgram:
    """One process of a program with three epochs, each followed by an evaluation.

    It breaks off each epoch before the last `unread` batches of its loader.
    """

    def __init__(
        self,
        loaders: str,
        interrupt: Callable[[Healer, str], None] = never,
        *,
        unread: int = 0,
    ) -> None:
        self.epochs: list[int] = []
        """The epochs that this process has begun."""
        self.evaluations: list[tuple[int, float, float]] = []
        """Step of each evaluation, and the random numbers that it has drawn."""
        self._batches = list(range(LENGTH + unread))
        self._has_new_loaders = loaders == "new loaders"
        self._interrupt = interrupt

    def __call__(self, healer: Healer, step: Step) -> None:
        for epoch in healer.epochs(EPOCHS):
            self.epochs.append(epoch)
            self._interrupt(healer, f"before epoch {epoch}")
            for batch in healer.batches(self._loader(), epoch=epoch):
                step(healer, batch)
                if batch == LENGTH - 1 and len(self._batches) > LENGTH:
                    break
            self._interrupt(healer, f"after epoch {epoch}")
            drawn = random.random(), float(torch.rand(()))
            self.evaluations.append((healer.step, *drawn))
            self._interrupt(healer, f"after evaluation {epoch}")

    def _loader(self) -> Any:
        if self._has_new_loaders:
            return DrawingLoader.fromkeys(self._batches)
        return self._batches


def continuation(
    framework: str,
    folder: Path,
    loaders: str,
    *,
    kill_at: int | None = None,
    interrupt: Callable[[Healer, str], None] = never,
    unread: int = 0,
    save_every: int = SAVE_EVERY,
) -> tuple[int, list[int]]:
    """The step at which a third process continues, and the epochs that it runs.

    The first process is killed at step 12. The second one is killed at `kill_at`, or interrupted.
    The third one must do from there on what a run does that nothing disturbs.
    """
    undisturbed = EpochProgram(loaders, unread=unread)
    whole = start(framework, folder / "undisturbed", undisturbed)
    killed = folder / "killed"
    first = EpochProgram(loaders, unread=unread)
    start(framework, killed, first, kill_at=12, save_every=save_every)
    second = EpochProgram(loaders, interrupt, unread=unread)
    start(framework, killed, second, kill_at=kill_at, save_every=save_every)

    last = EpochProgram(loaders, unread=unread)
    rest = start(framework, killed, last)

    assert whole == [*range(LENGTH)] * EPOCHS
    assert rest == whole[-len(rest) :]
    assert last.evaluations == undisturbed.evaluations[last.epochs[0] :]
    return len(whole) - len(rest), last.epochs


MOSTLY_ONE_LOADER = pytest.mark.parametrize(
    "loaders", ["one loader", pytest.param("new loaders", marks=pytest.mark.slow)]
)
MOSTLY_NEW_LOADERS = pytest.mark.parametrize(
    "loaders", ["new loaders", pytest.param("one loader", marks=pytest.mark.slow)]
)


@BOTH_FRAMEWORKS
@MOSTLY_ONE_LOADER
@pytest.mark.parametrize(
    ("kill_at", "continues_at"),
    [
        pytest.param(17, (16, [1, 2]), id="within an epoch"),
        # A save at an epoch's end (step 20) waits for the next step.
        pytest.param(22, (21, [2]), id="soon after an epoch's end"),
    ],
)
def test_an_epoch_continues_after_a_kill_in_it(framework, loaders, kill_at, continues_at, tmp_path):
    assert continuation(framework, tmp_path, loaders, kill_at=kill_at) == continues_at


@BOTH_FRAMEWORKS
@MOSTLY_NEW_LOADERS
@pytest.mark.parametrize(
    ("interrupt", "save_every"),
    [
        pytest.param(never, 4, id="a regular save"),  # in JAX within the body, before the `break`
        pytest.param(save("after epoch 1"), 6, id="after the epoch"),
        pytest.param(save("before epoch 2"), 6, id="before the next epoch"),
    ],
)
def test_an_epoch_that_a_break_has_ended_is_not_continued(
    framework, loaders, interrupt, save_every, tmp_path
):
    """The run is killed in the next epoch, which shows that the `break` has ended its epoch."""
    continues_at = continuation(
        framework,
        tmp_path,
        loaders,
        kill_at=22,
        interrupt=interrupt,
        unread=2,
        save_every=save_every,
    )
    assert continues_at == (20, [2])


@BOTH_FRAMEWORKS
@MOSTLY_NEW_LOADERS
def test_a_break_has_ended_its_epoch_if_the_next_one_has_begun_without_a_batch(
    framework, loaders, tmp_path
):
    interrupt = save_and_die("before epoch 2")
    continues_at = continuation(framework, tmp_path, loaders, interrupt=interrupt, unread=2)
    assert continues_at == (20, [2])


@BOTH_FRAMEWORKS
@MOSTLY_ONE_LOADER
@pytest.mark.parametrize(
    "interrupt",
    [save_and_die("after epoch 1"), fail("after evaluation 1")],
    ids=["killed", "an exception"],
)
def test_the_evaluation_of_an_epoch_is_repeated_if_the_next_epoch_has_not_begun(
    framework, loaders, interrupt, tmp_path
):
    assert continuation(framework, tmp_path, loaders, interrupt=interrupt) == (20, [1, 2])


@BOTH_FRAMEWORKS
@MOSTLY_NEW_LOADERS
@pytest.mark.parametrize(
    "interrupt",
    [save_and_die("before epoch 2"), fail("before epoch 2")],
    ids=["killed", "an exception"],
)
def test_an_epoch_that_has_begun_without_a_step_is_the_next_one(
    framework, loaders, interrupt, tmp_path
):
    assert continuation(framework, tmp_path, loaders, interrupt=interrupt) == (20, [2])


def test_batches_have_the_length_and_take_the_attributes_of_their_loader(tmp_path):
    """A program may set an attribute of its loader in each epoch, such as `mixup`."""

    def program(healer: Healer, step: Step) -> None:
        for epoch in healer.epochs(EPOCHS):
            loader = DrawingLoader.fromkeys(range(LENGTH))
            batches = healer.batches(loader, epoch=epoch).with_state()
            assert len(batches) == LENGTH
            assert batches.healer is healer

            batches.mixup = epoch
            assert batches.mixup == epoch
            assert vars(loader) == {"mixup": epoch}

            for batch, _ in batches:
                step(healer, batch)

    assert start("torch", tmp_path, program) == [*range(LENGTH)] * EPOCHS


@pytest.mark.parametrize(
    ("passes", "outcome"),
    [
        pytest.param(2, nullcontext(), id="all passes again: complete"),
        pytest.param(1, pytest.raises(IncompleteRun), id="the rest: incomplete"),
    ],
)
def test_a_start_after_a_kill_at_the_last_step_trains_nothing(passes, outcome, tmp_path):
    """It is complete if it repeats all passes of a loop without numbers of epochs."""
    loader = list(range(3 * SAVE_EVERY))  # a checkpoint at the last step of each pass

    def train(passes: int) -> Program:
        def program(healer: Healer, step: Step) -> None:
            for _ in range(passes):
                for batch in healer.batches(loader):
                    step(healer, batch)

        return program

    def train_and_die(healer: Healer, step: Step) -> None:
        train(2)(healer, step)
        raise Crash

    assert start("torch", tmp_path, train_and_die) == loader * 2
    with outcome:
        assert start("torch", tmp_path, train(passes)) == []


# -- orders, evaluations and counts ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["before the loop", "in each epoch", "in each pass"])
@pytest.mark.parametrize("kill_at", [7, 17, 20])
def test_an_order_that_the_program_draws_is_the_same_after_a_kill(drawn, kill_at, tmp_path):
    """`healer.epochs` counts epochs, and a `range` counts passes that a new process repeats."""
    has_epochs = drawn == "in each epoch"
    biases: list[torch.Tensor] = []

    def program(healer: Healer, step: Step) -> None:
        order = torch.randperm(LENGTH).tolist()
        for epoch in healer.epochs(EPOCHS) if has_epochs else range(EPOCHS):
            if drawn != "before the loop":
                order = torch.randperm(LENGTH).tolist()
            for batch in healer.batches(order, epoch=epoch if has_epochs else None):
                step(healer, batch)
        biases.append(healer.state["model"][0].bias)

    whole = start("torch", tmp_path / "whole", program)
    killed = tmp_path / "killed"
    start("torch", killed, program, kill_at=kill_at)
    start("torch", killed, program, kill_at=kill_at + 3)
    rest = start("torch", killed, program)

    assert rest == whole[-len(rest) :]
    assert torch.equal(*biases)


@pytest.mark.slow
def test_no_update_on_a_batch_is_lost(tmp_path):
    """A resume in the middle of a batch would leave out its other updates."""

    def program(healer: Healer, step: Step) -> None:
        for batch in healer.batches(range(8)):
            for _ in range(3):
                step(healer, batch)

    start("jax", tmp_path, program, kill_at=17)  # the last checkpoint is at the end of batch 3
    rest = start("jax", tmp_path, program)
    assert rest == [4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7]


def batches_loop(healer: Healer) -> Iterator[int]:
    return iter(healer.batches(range(40)))


def steps_loop(healer: Healer) -> Iterator[int]:
    return iter(healer.steps(40))


def loop_with_evaluations(healer: Healer) -> Iterator[int]:
    """Five loops of eight steps, each followed by an evaluation that draws random numbers."""
    for first in range(0, 40, 8):
        yield from healer.batches(range(first, first + 8))
        validation: Any = DataLoader(range(3))  # type: ignore[arg-type]
        assert len(list(healer.batches(validation))) == 3


def evaluate_other_weights(healer: Healer, bias: torch.Tensor) -> None:
    """Evaluates weights of zero, and puts the trained ones back."""
    validation = [100, 101, 102]
    trained = bias.clone()
    bias.zero_()
    assert len(list(healer.batches(validation, name="validation"))) == 3
    next(healer.batches(validation, name="validation"))  # a `break` ends it
    bias.copy_(trained)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [batches_loop, steps_loop, loop_with_evaluations])
def test_an_evaluation_is_whole_after_a_kill_and_no_checkpoint_has_its_weights(loop, tmp_path):
    biases: list[torch.Tensor] = []

    def program(healer: Healer, step: Step) -> None:
        bias = healer.state["model"][0].bias.data
        for number in loop(healer):
            assert healer.step == number
            step(healer, number)
            if loop is not loop_with_evaluations and healer.step % SAVE_EVERY == 0:
                evaluate_other_weights(healer, bias)
        biases.append(bias)

    start("torch", tmp_path / "whole", program)
    start("torch", tmp_path / "killed", program, kill_at=22)
    rest = start("torch", tmp_path / "killed", program)

    assert rest == [*range(20, 40)]
    assert torch.equal(*biases)


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_numbers_continue_after_a_rollback_and_after_a_kill(kind, framework, tmp_path):
    """An epoch may be one step without `batches`."""
    numbers: list[int] = []

    def program(healer: Healer, step: Step) -> None:
        for number in getattr(healer, kind)(30):
            numbers.append(number)
            assert healer.step == number
            step(healer, number)

    # The bad step 13 is rolled back. The process is killed at step 17.
    start(framework, tmp_path, program, kill_at=17, faults=Faults(once=[13]))
    (rollback,) = events(tmp_path, "rollback")
    back_to = rollback["checkpoint"]
    until_rollback = numbers.index(back_to, 13)
    assert numbers == [*range(until_rollback), *range(back_to, 17)]

    # The next process continues at the checkpoint of step 16.
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
@pytest.mark.parametrize(
    "raises_at",
    [(0, "after"), (7, "first evaluation"), (7, "second evaluation"), (7, "after")],
    ids=["after step 0", "before step 7", "within step 7", "after step 7"],
)
def test_an_exception_in_a_body_without_batches_loses_and_repeats_no_update(
    kind, error, raises_at, tmp_path
):
    """L-BFGS evaluates its closure several times, and changes the weights after the first time."""

    def run(store: str, raises_at: tuple[int, str] | None = None) -> torch.Tensor:
        new_process()
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=3)
        state = {"weight": weight, "optimizer": optimizer}
        with Healer("default", state=state, store=tmp_path / store) as healer:
            for number in getattr(healer, kind)(12):
                places = iter([(number, "first evaluation"), (number, "second evaluation")])

                def closure(places=places):
                    optimizer.zero_grad()
                    if raises_at is not None and next(places, None) == raises_at:
                        raise error
                    loss = weight.pow(4).sum()
                    healer.observe(loss)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                if (number, "after") == raises_at:
                    raise error
        return weight

    with pytest.raises(error):
        run("left", raises_at)
    assert torch.equal(run("left"), run("whole"))
