"""Several devices, and several processes of `jax.distributed`, decide as one device does."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from healcore import Healer
from healcore.jax import protect
from healcore.jax.opt_state import without_heal_state
from healcore.jax.store import OrbaxStore
from tests.jax import trained_together
from tests.jax.processes import Program
from tests.jax.trained_together import FAULT, FAULTS, FEWER_STEPS, KINDS_OF_FAULT, SPECS, STEPS
from tests.jax.two_processes import BAD, GOES_BACK, initial
from tests.runtime.store.programs import run

TOLERANCE = 1e-5
"""Relative, of losses and norms: four parts are added up in another order than one."""
SPREAD = [*SPECS]


def program(root: Path, *kinds: str, world: int, devices: int = 1) -> Program:
    scenarios = (f"trained_together:trained:{kind}" for kind in kinds)
    return Program(root, *scenarios, world=world, devices=devices)


def trained(found: Program, kind: str) -> list[Any]:
    return found.of(f"trained_together:trained:{kind}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoint of the one process."""
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one(root: Path) -> Program:
    """One process with four devices."""
    return program(root, *SPREAD, "alone", world=1, devices=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the runs of the two processes."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(one: Program, root: Path, folder: Path) -> Program:
    del one  # has saved
    names = ("exchanges", "healed:stopped", "healed:resumed", "healed:memory", "terminated")
    scenarios = [f"two_processes:{name}" for name in (*names, f"from_one:{root}", "refused")]
    return Program(folder, *scenarios, "trained_together:trained:sharded", world=2)


def check_run(outcomes: list[Any], alone: Any, steps: int = FEWER_STEPS) -> None:
    """All processes have skipped the faulty steps and no other, exactly, and decided as one has."""
    for each in outcomes:
        assert each["records"] == outcomes[0]["records"]
        assert {i for i, record in enumerate(each["records"]) if record[3]} == FAULTS
        assert each["unmoved"]
        assert each["whole"] == outcomes[0]["whole"]
        assert each["copies"] == outcomes[0]["copies"]
        assert each["on mesh"]
        assert each.get("restored", SAVED) == SAVED
    for found, expected in zip(outcomes[0]["records"], alone["records"], strict=False):
        assert found[:4] == expected[:4]
        assert found[4:] == pytest.approx(expected[4:], rel=TOLERANCE)
    assert len(outcomes[0]["records"]) == steps


SAVED = {"same": True, "moved": True, "listed": [True, 7, [], {"of": "the run"}]}


@pytest.mark.parametrize("kind", SPREAD)
def test_a_mesh_of_one_process_decides_as_one_device_does(kind: str, one: Program):
    check_run(trained(one, kind), trained(one, "alone")[0])


def test_two_processes_decide_as_one_does(two: Program, one: Program):
    check_run(trained(two, "sharded"), trained(one, "alone")[0], STEPS["sharded"])


@pytest.mark.stress
def test_four_processes_spread_in_every_way(one: Program, tmp_path: Path):
    found = program(tmp_path, *SPREAD, world=4)
    for kind in SPREAD:
        check_run(trained(found, kind), trained(one, "alone")[0], STEPS.get(kind, FEWER_STEPS))


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
    found = two.of("two_processes:terminated")
    assert [each.pop("told") for each in found] == [False, True]
    assert found[0] == found[1]
    assert found[0]["status"] == 128 + signal.SIGTERM
    assert found[0]["saved"] == found[0]["step"]
    assert found[0]["votes"] == [[found[0]["step"], "end", "signal 15"]]


def test_a_run_of_two_processes_continues_in_one(two: Program, folder: Path):
    ended = two.of("two_processes:terminated")[0]
    params = {name: jnp.asarray(each, jnp.float32) for name, each in initial().items()}
    tx = protect(optax.adamw(1e-2), GOES_BACK)
    # `step` was an array on the mesh when it was saved.
    state = {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}
    with Healer(GOES_BACK, state=state, store=folder / "terminated") as healer:
        assert healer.step == ended["step"]
        assert trained_together.digest(without_heal_state(healer.state)) == ended["state"]
        assert next(healer.batches(list(range(10**6)))) == ended["step"]


def test_a_checkpoint_of_four_devices_on_other_meshes_of_two(
    two: Program, one: Program, root: Path
):
    found = both(two, f"from_one:{root}")
    saved = trained(one, "sharded")[0]["whole"]
    assert found == {
        "two axes": saved,
        "two axes, placed": True,
        "data parallel": saved,
        "data parallel, placed": True,
    }


def test_a_checkpoint_of_two_processes_in_one(two: Program, folder: Path):
    params, state = trained_together.begin("alone")
    like = {"params": params, "opt_state": state}
    found = OrbaxStore(folder / "sharded").restore(7, like).state
    digest = trained_together.digest((found["params"], found["opt_state"]))
    assert digest == trained(two, "sharded")[0]["whole"]


def test_arrays_of_one_process_alone_have_to_be_the_same_in_all(two: Program):
    found = both(two, "refused")
    assert (found["key"], found["n"], found["local"]) == ([0, 0], [0, 1, 2], True)
    assert "run.key differs between the 2 processes" in found["said"]
    assert (found["steps"], found["left"]) == ([1], [])


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.stress)])
def test_a_process_that_is_killed_in_a_save_leaves_whole_checkpoints(kills: int, tmp_path: Path):
    done = run("tests.jax.killed_processes", tmp_path, kills, 1)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == kills
    assert counts["within a save"] >= 1, counts


# -- with a `loss_fn` several devices and processes decide as one does ----------------------------

RELATIVE = {"damage": 1e-3, "healthy": 1e-5}
"""Relative, of losses: several devices add up in another order than one. Damaged weights multiply
the difference. At 100 times the rate training is chaotic: those current weights differ."""


def compared(world: int, devices: int = 1) -> Program:
    scenarios = (f"trained_together:compared:{fault}" for fault in KINDS_OF_FAULT)
    return Program("", *scenarios, world=world, devices=devices)


def outcomes_of(found: Program, fault: str) -> list[Any]:
    return found.of(f"trained_together:compared:{fault}")


@pytest.fixture(scope="module")
def one_device() -> Program:
    return compared(1)


def check(found: Any, one: Any, fault: str) -> None:
    assert len(found["rollbacks"]) == len(one["rollbacks"])
    for mine, expected in zip(found["rollbacks"], one["rollbacks"], strict=True):
        chaotic = {"step": 0, "checkpoint": 0} if fault == "rate" else {}
        assert {**mine, **chaotic} == {**expected, **chaotic}
        # At 100 times the rate training is chaotic: the last bits decide the size of a bet.
        assert abs(mine["step"] - expected["step"]) <= (20 if fault == "rate" else 0)
    same_until = FAULT + 10 if fault == "rate" else math.inf
    assert found["lr_scale"] == one["lr_scale"]
    assert found["norm"] == pytest.approx(one["norm"], rel=1e-4)
    for mine, expected in zip(found["compared"], one["compared"], strict=fault in RELATIVE):
        if expected["steps"][0] >= same_until:
            break
        assert mine["steps"] == expected["steps"]
        assert mine["anchor"] == expected["anchor"]
        assert mine["then"] == pytest.approx(expected["then"], rel=1e-5)
        if fault in RELATIVE:
            assert mine["now"] == pytest.approx(expected["now"], rel=RELATIVE[fault], nan_ok=True)


def test_one_device_goes_back_from_faults_only(one_device: Program):
    [damage], [rate], [healthy] = (outcomes_of(one_device, fault) for fault in KINDS_OF_FAULT)
    assert [each["checkpoint"] for each in damage["rollbacks"]] in ([40], [60])  # before the fault
    assert damage["rollbacks"][0]["lr_limit"] is None
    assert [each["checkpoint"] for each in rate["rollbacks"]] in ([40], [60])
    assert rate["lr_scale"] == pytest.approx(0.01)
    assert healthy["rollbacks"] == []
    assert sum(each["steps"][0] >= FAULT for each in healthy["compared"]) > 3


@pytest.mark.slow
def test_four_devices_of_one_process_decide_as_one(one_device: Program):
    found = compared(1, devices=4)
    for fault in KINDS_OF_FAULT:
        check(outcomes_of(found, fault)[0], outcomes_of(one_device, fault)[0], fault)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_decide_as_one(world: int, one_device: Program):
    found = compared(world)
    for fault in KINDS_OF_FAULT:
        outcomes = outcomes_of(found, fault)
        assert all(each == outcomes[0] for each in outcomes)  # to the bit
        check(outcomes[0], outcomes_of(one_device, fault)[0], fault)
