"""What a start after a crash must know, one fact per test. All at once: test_killed.py."""

from __future__ import annotations

from typing import Any

import pytest

from healcore import policy as policies
from healcore.runtime.loop.saver import Saver
from tests.healer.crashes import crash
from tests.healer.killed_runs import (
    is_poisoned,
    killed,
    never_known_good,
    poison,
    poisoned,
    show_poison,
)
from tests.healer.run_directory import events
from tests.healer.training_loops import RULES, Faults, broken_at, loop_of, rules, train


def test_incidents_are_counted_on_through_a_rollback_that_was_cut_short(tmp_path, monkeypatch):
    def go() -> Any:
        loop = loop_of("torch", Faults(always=[13, 33]))
        return train(loop, rules(), range(50), store=tmp_path)

    crash(monkeypatch, Saver, "commit", lambda self, step: len(self.ledger.rollbacks) > 1, go)
    seen = {}

    def look(healer: Any, number: int) -> None:
        seen["counted"] = healer._run.recovery.ledger.incident_count

    loop = loop_of("torch", Faults(always=[13, 33]))
    train(loop, rules(), range(50), store=tmp_path, before=look)
    assert seen["counted"] == 2
    assert [event["incident"] for event in events(tmp_path, "incident")] == [1, 2, 2]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_checkpoint_whose_state_breaks_again_is_not_restored_twice(framework, tmp_path):
    killed(poisoned, framework, tmp_path)
    policy = never_known_good()
    loop = loop_of(framework, policy=policy)

    def look(healer: Any, number: int) -> None:
        loop.state = healer.state
        show_poison(loop, number)

    facts = train(loop, policy, range(30), store=tmp_path, before=look)
    assert not is_poisoned(loop)
    assert [event["checkpoint"] for event in events(tmp_path, "rollback")] == [10, 0]
    assert facts["rollbacks"] == 2


def test_the_budgets_after_a_rollback_hold_for_older_checkpoints_too(tmp_path, monkeypatch):
    """The checkpoint that it went to is damaged by the next start, which takes an older one."""

    def go(before: Any = None) -> Any:
        loop = loop_of("torch", Faults(always=[23]))
        return train(loop, rules(), range(40), store=tmp_path, before=before)

    def stumble(healer: Any, number: int) -> None:
        if healer.rollbacks:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        go(stumble)
    (folder,) = tmp_path.glob("step-0000000015.*")
    (folder / "state.json").write_text("{}")
    seen = {}

    def look(healer: Any, number: int) -> None:
        engine = healer._loop.driver.engines()["optimizer"]["state"]
        seen.setdefault("at", healer.step)
        seen.setdefault("left", engine["budget"]["recoveries"])
        seen.setdefault("done", engine["tally"]["rollbacks"])

    go(look)
    assert seen == {"at": 10, "left": 2, "done": 1}


def test_a_restart_whose_data_are_used_up_is_reported(tmp_path):
    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=broken_at(27))
    train(loop_of("torch"), rules(), range(20), store=tmp_path)
    assert any("exhausted" in event["problem"] for event in events(tmp_path, "problem"))


BROKEN, SEEN, STEPS = 10, 28, 40


def deep() -> Any:
    """Goes back one checkpoint, then three, then five, ..."""
    text = RULES.format(cut="", skip_batches=0, recoveries=8)
    return policies.loads(text.replace("[rollback]", "[rollback]\ndeepen = 2"))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_it_is_left_behind(framework, tmp_path):
    loop = loop_of(framework, policy=deep())
    broken = False

    def drift(healer: Any, number: int) -> None:
        nonlocal broken
        loop.state = healer.state
        if number == BROKEN and not broken:
            broken = True
            poison(loop)
            healer.update(loop.state) if framework == "jax" else None
        loop.faults.always = frozenset([number] if number >= SEEN and is_poisoned(loop) else [])

    facts = train(loop, deep(), range(STEPS), store=tmp_path, save_every=2, before=drift)
    targets = [event["checkpoint"] for event in events(tmp_path, "rollback")]
    assert len(targets) >= 2
    assert min(targets[:-1]) > BROKEN >= targets[-1], "only the last one was deep enough"
    assert len(events(tmp_path, "good")) > 8, "and the newest three had left it behind long since"
    assert not is_poisoned(loop)
    assert facts["step"] > SEEN
