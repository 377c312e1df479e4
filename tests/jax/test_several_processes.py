"""Several devices, and several processes of `jax.distributed`, decide as one device does."""

import random
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from healcore import Healer
from healcore.jax import protect
from healcore.jax.opt_state import without_heal_state
from tests.jax import trained_together
from tests.jax.killed_processes import SAVES, SECONDS
from tests.jax.processes import Program
from tests.jax.trained_together import FAULTS, KINDS_OF_FAULT, SPECS, STEPS
from tests.jax.two_processes import BAD, POLICY
from tests.torch.forked_ranks import free_port, run_ranks
from tests.torch.test_compared_ranks import goes_back_from_faults_only

pytestmark = pytest.mark.slow  # several processes

SAVED = {"same": True, "moved": True, "listed": [True, 7, [], {"of": "the run"}]}


def program(root: Path, *kinds: str, world: int, devices: int = 1) -> Program:
    scenarios = (f"trained_together:trained:{kind}" for kind in kinds)
    return Program(root, *scenarios, world=world, devices=devices)


def trained(found: Program, kind: str) -> list[Any]:
    return found.of(f"trained_together:trained:{kind}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoint of the one process, and the runs of the two in "two"."""
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one(folder: Path) -> Program:
    """One process with four devices."""
    return program(folder, *SPECS, "alone", world=1, devices=4)


@pytest.fixture(scope="module")
def two(one: Program, folder: Path) -> Program:
    del one  # has saved
    runs = [f"healed:{kind}" for kind in ("stopped", "resumed", "memory", "terminated")]
    names = ("exchanges", *runs, f"from_one:{folder}", "refused")
    scenarios = [f"two_processes:{name}" for name in names]
    return Program(folder / "two", *scenarios, "trained_together:trained:sharded", world=2)


def check_run(found: Program, one: Program, kind: str) -> None:
    """All processes have skipped the faulty steps and no other, exactly, and decided as one has."""
    outcomes, (alone,) = trained(found, kind), trained(one, "alone")
    first = outcomes[0]
    for each in outcomes:
        assert each["unmoved"]
        assert each["on mesh"]
        assert each.get("restored", SAVED) == SAVED
        for name in ("records", "whole", "copies"):
            assert each[name] == first[name]
    assert {i for i, record in enumerate(first["records"]) if not record[3]} == FAULTS
    assert len(first["records"]) == STEPS
    for mine, expected in zip(first["records"], alone["records"], strict=True):
        assert mine[:4] == expected[:4]
        # Losses and norms: four parts are added up in another order than one.
        assert mine[4:] == pytest.approx(expected[4:], rel=1e-5)


@pytest.mark.parametrize("kind", SPECS)
def test_a_mesh_of_one_process_decides_as_one_device_does(kind: str, one: Program):
    check_run(one, one, kind)


def test_two_processes_decide_as_one_does(two: Program, one: Program):
    check_run(two, one, "sharded")


@pytest.mark.stress
def test_four_processes_train_as_one_however_they_are_spread(one: Program, tmp_path: Path):
    found = program(tmp_path, *SPECS, world=4)
    for kind in SPECS:
        check_run(found, one, kind)


def test_exchanges_of_two_threads_are_kept_apart_and_none_waits_forever(two: Program):
    found = two.of("two_processes:exchanges")
    assert [(each["items"], each["behind"]) for each in found] == [(True, True)] * 2
    first, second = found[0]["apart"]
    assert "process 1 of 2 has not joined an exchange within 0.2 s" in first
    assert second == first  # at once: the other process may be anywhere
    assert found[1]["apart"] == []


def both(two: Program, case: str) -> Any:
    """What both processes saw, which has to be the same."""
    first, second = two.of(f"two_processes:{case}")
    assert first == second
    return first


def test_two_processes_go_back_together_stop_and_resume(two: Program):
    stopped, resumed, whole = (
        both(two, case) for case in ("healed:stopped", "healed:resumed", "healed:memory")
    )
    assert (stopped["rollbacks"], stopped["stopped"]) == (1, "far enough")
    assert (resumed["first"], resumed["stopped"], resumed["step"]) == (30, None, 39)
    assert resumed["listed"][-1] == 39
    # A run with snapshots in memory only, without an interruption, ends in the same bits.
    assert (whole["rollbacks"], whole["stopped"], whole["step"]) == (1, None, 39)
    assert whole["order"].count(BAD) == 1
    assert resumed["state"] == whole["state"]
    # With the number 0 as the step, and with an array: a rollback adds nothing.
    assert stopped["traced"] == 2


def test_a_signal_to_one_process_ends_both_after_the_same_step(two: Program):
    found = both(two, "healed:terminated")
    assert found["stopped"] == 128 + signal.SIGTERM
    assert found["listed"][-1] == found["step"]
    ((step, why),) = found["votes"]
    assert step == found["step"]
    assert why.endswith("SIGTERM")


def test_a_run_of_two_processes_continues_in_one(two: Program, folder: Path):
    ended = both(two, "healed:terminated")
    params, _ = trained_together.begin("alone")
    tx = protect(optax.adamw(1e-2), POLICY)
    # `step` was an array on the mesh when it was saved.
    state = {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}
    with Healer(POLICY, state=state, store=folder / "two/terminated/store") as healer:
        assert healer.step == ended["step"]
        assert trained_together.digest(without_heal_state(healer.state)) == ended["state"]
        assert next(healer.batches(list(range(10**6)))) == ended["step"]


def test_a_checkpoint_of_four_devices_is_restored_on_other_meshes_of_two(
    two: Program, one: Program, folder: Path
):
    found = both(two, f"from_one:{folder}")
    saved = trained(one, "sharded")[0]["whole"]
    for kind in ("two axes", "data parallel"):
        assert (found[kind], found[f"{kind}, placed"]) == (saved, True)


def test_arrays_of_one_process_alone_have_to_be_the_same_in_all(two: Program):
    found = both(two, "refused")
    assert (found["key"], found["n"], found["local"]) == ([0, 0], [0, 1, 2], True)
    assert "run.key differs between the 2 processes" in found["said"]
    assert (found["steps"], found["left"]) == ([1], [])


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.stress)])
def test_a_process_that_is_killed_in_a_save_leaves_whole_checkpoints(kills: int, tmp_path: Path):
    draw = random.Random(1)
    within_a_save = 0
    for number in range(kills + 1):
        aim = (number % 2, draw.randrange(1, SAVES), draw.random() / 2) if number < kills else ()
        arguments = (str(free_port()), tmp_path, *map(str, aim))
        found = run_ranks("tests.jax.killed_processes", *arguments, world=2, seconds=3 * SECONDS)
        ends = [{"killed", "whole"} & {*out.split()} for out, _ in found]
        wanted = [{"killed"} if rank in aim[:1] else set() if aim else {"whole"} for rank in (0, 1)]
        assert ends == wanted, found
        assert not any("AssertionError" in errors for _, errors in found), found
        within_a_save += bool(list(tmp_path.glob(".tmp*")))
    assert within_a_save >= 1


def compared(*faults: str, world: int = 1, devices: int = 1) -> list[list[Any]]:
    """What each process saw, by fault."""
    scenarios = [f"trained_together:compared:{fault}" for fault in faults]
    found = Program("", *scenarios, world=world, devices=devices)
    return [found.of(scenario) for scenario in scenarios]


@pytest.fixture(scope="module")
def one_device() -> list[Any]:
    return [found for (found,) in compared(*KINDS_OF_FAULT, "rate")]


def test_one_device_goes_back_from_faults_only(one_device: list[Any]):
    for fault, found in zip((*KINDS_OF_FAULT, "rate"), one_device, strict=True):
        goes_back_from_faults_only(fault, found)


@pytest.mark.parametrize(("world", "devices"), [(1, 4), (2, 1)])
def test_several_decide_as_one(world: int, devices: int, one_device: list[Any]):
    found = compared(*KINDS_OF_FAULT, world=world, devices=devices)
    for fault, mine, one in zip(KINDS_OF_FAULT, found, one_device, strict=False):
        assert all(each == mine[0] for each in mine)  # to the bit
        for name in ("rollbacks", "lr_scale"):
            assert mine[0][name] == one[name]
        assert mine[0]["norm"] == pytest.approx(one["norm"], rel=1e-4)
        # Devices add up in another order than one; damaged weights multiply the difference.
        relative = 1e-3 if fault == "damage" else 1e-5
        for ours, expected in zip(mine[0]["compared"], one["compared"], strict=True):
            assert (ours["steps"], ours["anchor"]) == (expected["steps"], expected["anchor"])
            assert ours["then"] == pytest.approx(expected["then"], rel=1e-5)
            assert ours["now"] == pytest.approx(expected["now"], rel=relative, nan_ok=True)
