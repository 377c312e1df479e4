"""An interrupted program ends bit for bit as the program that is not interrupted.

Program x interruption x step: the final weights and moments, the random numbers after the run, the
number of steps, and for each step its batches and its loss are those of the run that nothing has
interrupted. A test knows a program as its user does: by its files, its exit status, its exceptions.
"""

import importlib
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healcore.errors import Interrupted, Terminated
from tests import forked_programs
from tests.pins.programs.interruptions import Interruption, Kind, Place, Power, Run

STEPS = 48
"""Number of steps of each program."""
KILLED: tuple[Kind, ...] = ("kill", "disk")
"""Interruptions that need a process of their own."""
RESTARTED: tuple[Kind, ...] = ("kill", "disk", "sigterm", "ctrl-c", "exit", "exception", "oom")
EVERY: tuple[Kind, ...] = (*RESTARTED, "break", "damage")


class Program(NamedTuple):
    """A program."""

    kinds: tuple[Kind, ...] = EVERY
    """What may interrupt it."""
    repeats: int = 1
    """How many steps an orderly end may repeat."""
    forked: bool = False
    """Whether each start needs a process of its own: the run is open until its process ends."""
    imports: tuple[str, ...] = forked_programs.TORCH_AND_JAX


PROGRAMS = {
    "loader": Program(),
    "epochs": Program(),
    # A `break` completes a loop of which healcore does not know the length.
    "steps": Program((*RESTARTED, "damage")),
    "generator": Program((*RESTARTED, "damage")),
    # A rollback cannot rewind it: its steps are not repeated.
    "iterator": Program(RESTARTED),
    "script": Program(forked=True),
    "accumulation": Program(),
    "microbatches": Program(),
    # Between its two optimizers nothing can be saved: the newest checkpoint has to do.
    "two_optimizers": Program(repeats=6),
    "jax_loader": Program(),
    # Nothing of a block is left if it is interrupted.
    "jax_scan": Program(("kill", "disk", "sigterm", "exception"), repeats=4),
    # A `break` is its `should_training_stop`, which completes the run.
    "trainer": Program((*RESTARTED, "damage"), imports=forked_programs.TRANSFORMERS),
}


class Ended(NamedTuple):
    """What a run has trained and where it has ended."""

    end: dict[str, Any]
    trace: dict[int, Any]
    repeated: int
    """Number of steps that were trained more than once."""


STATUS = {"kill": -9, "disk": -9, "sigterm": 143, "ctrl-c": 130, "exit": 3}
"""Exit status of a process. An exception has 1, and a program that ends has 0."""


def start(name: str, folder: Path, *interruptions: Interruption) -> None:
    """One start of a program, in a process of its own if it is killed."""
    module, program = f"tests.pins.programs.{name}", PROGRAMS[name]
    kinds = [each.kind for each in interruptions]
    if not program.forked and not {*kinds} & {*KILLED}:
        importlib.import_module(module).train(Run(folder, *interruptions))
        return
    done = forked_programs.run("-m", module, folder, *interruptions, imports=program.imports)
    expected = {0}
    if kinds:
        expected.add(STATUS.get(kinds[-1], 1))
    assert done.returncode in expected, done.stderr[-3000:]


def starts_of(interruptions: Sequence[Interruption]) -> list[list[Interruption]]:
    """The interruptions of each start. Damage does not end it, so the next one is in it too."""
    found: list[list[Interruption]] = [[]]
    for each in interruptions:
        found[-1].append(each)
        if each.kind != "damage":
            found.append([])
    return found


def interrupted(name: str, folder: Path, *interruptions: Interruption) -> Ended:
    """Starts a program until it ends: with each interruption once, and then with none."""
    for mine in [*starts_of(interruptions), []]:
        if (folder / "end.json").exists():
            break
        last = mine[-1].kind if mine else ""
        try:
            start(name, folder, *mine)
        except (Power, Terminated, Interrupted) as error:
            assert last in ("exception", "sigterm", "ctrl-c"), error
        except SystemExit as error:
            assert (last, error.code) == ("exit", 3)
        except Exception as error:
            # JAX wraps the exception of a callback in an exception of its own.
            names = {"oom": "memory", "exception": "Power"}
            assert names.get(last, "?") in str(error), error
    end = json.loads((folder / "end.json").read_text())
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    trace = {line["step"]: line for line in lines}
    if all(each.kind != "damage" for each in interruptions):
        assert all(line == trace[line["step"]] for line in lines), "a repeated step is the same"
    return Ended(end, trace, len(lines) - len(trace))


@cache
def uninterrupted(name: str) -> Ended:
    with TemporaryDirectory() as folder:
        found = interrupted(name, Path(folder) / "run")
    assert found.end["steps"] == len(found.trace) == STEPS
    assert found.repeated == 0
    return found


def check(name: str, folder: Path, *interruptions: Interruption) -> None:
    """Asserts that the interrupted run ends as the run that is not interrupted."""
    clean = uninterrupted(name)
    found = interrupted(name, folder, *interruptions)
    assert found.end == clean.end
    assert found.trace == clean.trace
    # `sys.exit` within a step is not saved: the newest checkpoint has to do, as after a kill.
    if not {"damage", "exit", *KILLED} & {each.kind for each in interruptions}:
        assert found.repeated <= len(interruptions) * PROGRAMS[name].repeats


TABLE = """
loader:         kill:23:after  sigterm:20:after  exception:17:before break:31:after damage:45:after
epochs:         kill:33:after  sigterm:16:after  exception:15:after  break:20:after damage:22:before
steps:          kill:11:after  sigterm:20:before exit:30:after       damage:12:after
generator:      kill:18:after  sigterm:35:after  oom:16:before       damage:30:after
iterator:       kill:29:after  ctrl-c:20:after   exception:9:after
script:         disk:60:after  sigterm:20:after  exit:17:before      break:46:after
accumulation:   kill:21:before sigterm:20:before exception:18:before break:30:before damage:21:after
microbatches:   disk:40:after  sigterm:19:before oom:13:before       damage:30:before
two_optimizers: kill:22:before sigterm:20:before exception:19:before break:33:after damage:21:after
jax_loader:     kill:24:after  sigterm:20:after  exception:17:before break:31:after damage:21:after
jax_scan:       sigterm:18:after
trainer:        sigterm:20:after exception:17:before oom:19:before   damage:12:after
"""
"""Program and its interruptions, as KIND:STEP:PLACE."""


def cases() -> list[Any]:
    found = []
    for line in TABLE.strip().splitlines():
        name, _, interruptions = line.partition(":")
        found += [(name, Interruption.parse(each)) for each in interruptions.split()]
    return found


@pytest.mark.parametrize(
    ("damage", "interruption"),
    [("damage:20:after", "kill:27:after"), ("damage:20:after", "exception:31:after")],
)
def test_a_program_that_is_interrupted_within_a_trouble(
    damage: str, interruption: str, tmp_path: Path
):
    check("loader", tmp_path / "run", *map(Interruption.parse, (damage, interruption)))


@pytest.mark.parametrize(("name", "interruption"), cases(), ids=str)
def test_an_interrupted_program_ends_as_one_that_is_not(
    name: str, interruption: Interruption, tmp_path: Path
):
    check(name, tmp_path / "run", interruption)


DIFFERENT = [
    (
        "epochs",
        "break:15:after",
        "a program that leaves `healer.epochs` at the last batch of an epoch has completed its run",
    ),
    ("steps", "break:20:after", "a program that leaves `healer.steps` has completed its run"),
    (
        "two_optimizers",
        "break:22:before",
        "a batch is trained as soon as one optimizer has stepped, as the critic of a WGAN",
    ),
]


@pytest.mark.parametrize(
    ("name", "interruption"),
    [
        pytest.param(name, text, marks=pytest.mark.xfail(raises=AssertionError, reason=why))
        for name, text, why in DIFFERENT
    ],
)
def test_an_interruption_that_is_known_to_change_the_run(
    name: str, interruption: str, tmp_path: Path
):
    check(name, tmp_path / "run", Interruption.parse(interruption))


@st.composite
def drawn(draw: st.DrawFn, name: str) -> list[Interruption]:
    """One to three interruptions, at steps that only grow."""
    kinds = draw(st.lists(st.sampled_from(PROGRAMS[name].kinds), min_size=1, max_size=3))
    if "damage" in kinds:
        # A second damage within the same trouble is answered otherwise, and a program that breaks
        # off while its weights are NaN is stopped with a diagnosis.
        first = kinds.index("damage") + 1
        kinds[first:] = [each for each in kinds[first:] if each not in ("damage", "break")]
    steps = sorted(draw(st.integers(0, STEPS - 2)) for _ in kinds)
    if name == "script":  # a start takes more than one step (DIFFERENT)
        steps = [min(step + 2 * place + 2, STEPS - 2) for place, step in enumerate(steps)]
    return [draw(placed(name, *each)) for each in zip(kinds, steps, strict=True)]


@st.composite
def placed(draw: st.DrawFn, name: str, kind: Kind, step: int) -> Interruption:
    """An interruption near a step, where it changes nothing."""
    places: tuple[Place, ...] = ("before", "after")
    if kind == "damage":
        # In the first steps no rate is known to be healthy, so the repeat is at a lower rate. In
        # the last ten steps it is noticed at the end (DIFFERENT).
        step = min(max(step, 8), STEPS - 12)
        if name == "two_optimizers":
            places = ("after",)
        if name == "trainer":  # not noticed at the end of an epoch (DIFFERENT)
            step = max(16, step - step % 16 + min(step % 16, 5))
    if kind == "break":
        # A loop that has read a batch and taken no step is a fault of the program (IncompleteRun).
        step = max(step, 1)
        if name == "epochs" and step % 16 == 15:
            step -= 1
        if name == "two_optimizers":  # between them, the batch counts as trained (DIFFERENT)
            places = ("after",)
    if name == "jax_scan":
        places = ("after",)
    return Interruption(kind, step, draw(st.sampled_from(places)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_program_that_is_interrupted_again_and_again(
    name: str, data: st.DataObject, tmp_path: Path
):
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    check(name, folder, *data.draw(drawn(name)))
