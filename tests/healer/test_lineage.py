"""The journal and the first snapshot belong to one run, through all of its processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healcore import policy as policies
from healcore.runtime.rollback.journal import Journal, JournalError
from healcore.runtime.rollback.manager import RollbackManager
from healcore.runtime.store import NoGoodCheckpoint, StoreError, checksummed_json
from healcore.runtime.store import tiered as tiers
from tests.healer.loops import RULES, Faults, loop_of, rules, same, train
from tests.healer.reading import events
from tests.healer.test_restarts import crash

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def unproven() -> Any:
    """A policy under which no checkpoint of a short run becomes known-good."""
    text = RULES.format(cut="", skip_batches=0, recoveries=3)
    return policies.loads(text.replace("probation = 4", "probation = 1000"))


def killed(scenario: Callable[..., None], *arguments: object) -> None:
    """Runs a function of this file in a process of its own, until it kills itself."""
    code = f"import sys; from tests.healer import test_lineage as t; t.{scenario.__name__}"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}(*sys.argv[1:])", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == -9, done.stderr


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- a kill before the first known-good -----------------------------------------------------------


def big(loop: Any) -> bool:
    if loop.framework == "torch":
        return float(loop.model[0].bias.detach().max()) > 1e6
    return float(loop.state["params"]["b1"].max()) > 1e6


def poison(loop: Any) -> None:
    """Finite, and no loss shows it yet."""
    if loop.framework == "torch":
        loop.model[0].bias.data += 1e8
    else:
        params = loop.state["params"]
        loop.state = {**loop.state, "params": {**params, "b1": params["b1"] + 1e8}}


def show(loop: Any, number: int) -> None:
    """From batch 12 on a poisoned model has NaN for its loss."""
    loop.faults.always = frozenset([number] if number >= 12 and big(loop) else [])


def dies_poisoned(framework: str, folder: str) -> None:
    """Poisoned at step 8, saved at step 10, killed at step 11."""
    policy = unproven()
    loop = loop_of(framework, policy=policy)

    def before(healer: Any, number: int) -> None:
        if number == 8:
            loop.state = healer.state
            poison(loop)
            healer.update(loop.state) if framework == "jax" else None
        if number == 11:
            healer.store.wait()
            die()

    train(loop, policy, range(30), store=Path(folder), before=before)


@BOTH
def test_what_was_never_proven_is_not_gone_back_to(framework, tmp_path):
    killed(dies_poisoned, framework, tmp_path)
    policy = unproven()
    loop = loop_of(framework, policy=policy)

    def look(healer: Any, number: int) -> None:
        loop.state = healer.state
        show(loop, number)

    facts = train(loop, policy, range(30), store=tmp_path, before=look)
    assert not big(loop)
    assert [event["checkpoint"] for event in events(tmp_path, "rollback")] == [0]
    assert facts["rollbacks"] == 1


# -- a stale journal ----------------------------------------------------------------------------


def dies_with_a_cut(folder: str) -> None:
    """Killed after a rollback; what the checkpoints do not know is in the journal."""

    def before(healer: Any, number: int) -> None:
        if healer.rollbacks:
            die()

    loop = loop_of("torch", Faults(always=[13]))
    train(loop, rules(), range(40), store=Path(folder), before=before)


def first_look(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    seen: dict[str, Any] = {}

    def look(healer: Any, number: int) -> None:
        engine = healer.driver.healing()["optimizer"]["state"]
        seen.setdefault("at", healer.step)
        seen.setdefault("lr", engine["lr"]["scale"])
        seen.setdefault("left", engine["budget"]["recoveries"])
        seen.setdefault("rollbacks", healer.rollbacks)

    loop = loop_of("torch", Faults(always=[13]))
    train(loop, rules(), range(10), store=folder, before=look, **options)
    return loop, seen


def test_a_journal_without_its_checkpoints_is_no_new_run_s(tmp_path):
    killed(dies_with_a_cut, tmp_path)
    for each in tmp_path.glob("step-*"):
        shutil.rmtree(each)
    with pytest.raises(NoGoodCheckpoint, match=r"healcore\.json.*delete it"):
        first_look(tmp_path)


def stumble(healer: Any, number: int) -> None:
    if number == 7:
        raise RuntimeError("power")


def test_a_journal_beside_another_run_s_checkpoints_is_refused(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    killed(dies_with_a_cut, one)
    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(10), store=other, before=stumble)
    for each in one.glob("step-*"):
        shutil.rmtree(each)
    for each in other.glob("step-*"):
        shutil.copytree(each, one / each.name)
    loop = loop_of("torch")
    before = loop.weights()
    with pytest.raises(JournalError, match=r"healcore\.json is of run .*delete the file"):
        train(loop, rules(), range(10), store=one)
    assert same(loop.weights(), before)
    (one / "healcore.json").unlink()
    _, seen = first_look(one)
    assert seen == {"at": 5, "lr": 1.0, "left": 3, "rollbacks": 0}


def test_a_journal_of_another_version_is_refused(tmp_path):
    path = tmp_path / "healcore.json"
    path.write_bytes(checksummed_json.dumps({"schema": 2, "begun": None}))
    with pytest.raises(JournalError, match=r"has schema 2, .* reads 3: .*delete it"):
        Journal(path).read()


def test_a_run_keeps_its_name_through_its_processes(tmp_path):
    def name() -> str:
        return json.loads((tmp_path / "healcore.json").read_text())["lineage"]

    killed(dies_with_a_cut, tmp_path)
    first = name()
    train(loop_of("torch"), rules(), range(40), store=tmp_path)
    assert name() == first
    healing = [json.loads(p.read_text()) for p in tmp_path.glob("step-*/healing.json")]
    assert {each["lineage"] for each in healing} == {first}
    (tmp_path / "healcore.json").unlink()
    train(loop_of("torch"), rules(), range(45), store=tmp_path)
    assert name() == first


# -- a kill before anything was on disk -----------------------------------------------------------


def dies_with_nothing_on_disk(folder: str) -> None:
    """The disk takes no checkpoint; killed in a rollback to the snapshot in memory."""

    def full(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    tiers.TieredStore._to_disk = full  # type: ignore[method-assign]
    tiers.TieredStore.restore = lambda *args, **kwargs: die()  # type: ignore[method-assign]
    loop = loop_of("torch", Faults(always=[3]))
    train(loop, rules(), range(40), store=Path(folder))


def test_a_rollback_of_a_run_without_a_checkpoint_is_not_in_the_way(tmp_path, caplog):
    killed(dies_with_nothing_on_disk, tmp_path)
    assert json.loads((tmp_path / "healcore.json").read_text())["pending"] is not None
    with caplog.at_level("INFO", "healcore"):
        loop, seen = first_look(tmp_path)
    assert seen == {"at": 0, "lr": 1.0, "left": 3, "rollbacks": 0}
    assert any("healcore.json" in record.getMessage() for record in caplog.records)
    assert loop.faults.order[:4] == [0, 1, 2, 3]


def test_a_rollback_that_cannot_be_finished_names_the_file(tmp_path, monkeypatch):
    def go() -> None:
        train(loop_of("torch", Faults(always=[13])), rules(), range(40), store=tmp_path)

    crash(monkeypatch, RollbackManager, "_apply_plan", lambda *_, **__: True, go)
    for each in tmp_path.glob("step-*"):
        (each / "state.json").write_text("{}")
    with pytest.raises(StoreError, match=r"healcore\.json.*delete that file"):
        go()
    with pytest.raises(StoreError, match=r"healcore\.json"):
        go()
