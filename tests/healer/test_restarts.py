"""What a start after a crash must know, one fact per test. All at once: test_killed.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore import Checkpoints, Healer
from healcore import policy as policies
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.loop.saver import Saver
from tests.healer.killed_runs import (
    is_poisoned,
    killed,
    never_known_good,
    poison,
    poisoned,
    show_poison,
)
from tests.healer.run_directory import events
from tests.healer.test_crashes import crash
from tests.healer.training_loops import RULES, Faults, broken_at, loop_of, rules, same, train


def test_random_numbers_of_later_epochs_are_new_ones(tmp_path, monkeypatch):
    """A loop that calls `batches` once for every epoch."""

    def go(drawn: list[float], folder: Any, die: bool = False) -> None:
        state = loop_of("torch").state
        with Healer(rules(), state=state, store=folder, checkpoints=Checkpoints(every=5)) as healer:
            data = list(range(10))
            for epoch in range(3):
                for number in healer.batches(data):
                    if die and (epoch, number) == (0, 7):
                        healer._loop.saver.store.wait()
                        raise RuntimeError("power")
                    drawn.append(torch.rand(()).item())
                    loss = state["model"](torch.ones(1, 4)).sum()
                    healer.observe(loss)
                    loss.backward()
                    state["optimizer"].step()
                    state["optimizer"].zero_grad()

    clean, first, second = [], [], []
    go(clean, tmp_path / "clean")
    with pytest.raises(RuntimeError, match="power"):
        go(first, tmp_path / "killed", die=True)
    go(second, tmp_path / "killed")
    assert second == clean[5:]


def test_data_that_only_runs_forward_is_not_read_twice(tmp_path, monkeypatch):
    def go(folder: str) -> Any:
        loop = loop_of("torch", Faults(always=[23]))
        return loop, train(loop, rules(), iter(range(50)), store=tmp_path / folder)

    clean, expected = go("clean")
    crash(monkeypatch, Recovery, "report", lambda *_: True, lambda: go("killed"))
    loop, facts = go("killed")
    assert facts["step"] == expected["step"]
    assert same(loop.weights(), clean.weights())
    assert loop.faults.order[0] == 25


def test_incidents_are_counted_on_through_a_rollback_that_was_cut_short(tmp_path, monkeypatch):
    def go() -> Any:
        loop = loop_of("torch", Faults(always=[13, 33]))
        return train(loop, rules(), range(50), store=tmp_path)

    crash(monkeypatch, Saver, "commit", lambda self, step: len(self.ledger.rollbacks) > 1, go)
    go()
    assert events(tmp_path, "end")[-1]["incidents"] == 2
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


def test_skipped_batches_stay_skipped_in_every_later_process(tmp_path, monkeypatch):
    """Killed long after the first rollback; the second one goes past the first one's window."""
    faults, options = Faults(always=[13, 31]), {"store": tmp_path}
    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch", faults), rules(), range(50), before=broken_at(27), **options)
    train(loop_of("torch", faults), rules(), range(50), **options)
    first, second = events(tmp_path, "rollback")
    assert second["checkpoint"] < first["onset"], "the test needs a deep one"
    assert faults.seen[13] == 1


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


BROKEN, SEEN = 10, 28


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_damage_of_long_ago_is_left_behind(framework, tmp_path):
    """The run goes back one checkpoint, then three, then five, ..."""
    text = RULES.format(cut="", skip_batches=0, recoveries=8)
    deep = policies.loads(text.replace("[rollback]", "[rollback]\ndeepen = 2"))
    loop, broken = loop_of(framework, policy=deep), []

    def drift(healer: Any, number: int) -> None:
        loop.state = healer.state
        if number == BROKEN and not broken:
            broken.append(number)
            poison(loop)
            healer.update(loop.state) if framework == "jax" else None
        loop.faults.always = frozenset([number] if number >= SEEN and is_poisoned(loop) else [])

    facts = train(loop, deep, range(40), store=tmp_path, save_every=2, before=drift)
    *before, last = [event["checkpoint"] for event in events(tmp_path, "rollback")]
    assert min(before) > BROKEN >= last, "only the last one was deep enough"
    assert len(events(tmp_path, "good")) > 8, "and the newest three had left it behind long since"
    assert not is_poisoned(loop)
    assert facts["step"] > SEEN
