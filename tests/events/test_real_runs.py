"""Real runs of the Healer, in both frameworks: every line that they write follows the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from healcore.core.verdict import Action
from healcore.events import read
from healcore.events.schema import KINDS
from healcore.runtime.loop.termination import LastStateNotSaved, RunStopped
from healcore.runtime.postmortem.postmortem import path_for
from tests.events.sample_events import problems
from tests.healer.run_directory import flip_a_bit
from tests.healer.training_loops import Faults, broken_at, loop_of, rules, train
from tests.runtime.store.disk_faults import read_only


def kinds_in(path: Path) -> set[str]:
    """The kinds in a file, every event of which is valid and has its run's postmortem."""
    history = read(path)
    assert history.problems == []
    for event in history.events:
        assert problems(event) == []
    for run, events in history.runs().items():
        content = json.loads(path_for(path, run).read_text())
        assert content["ending"] == events[-1]["ending"]
    return {event["kind"] for event in history.events}


def wrong_then_right(incident):
    if incident.number == 1:
        raise ValueError("a hook with a mistake in it")
    return incident.action | Action.SAVE


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_run_with_all_sorts_of_trouble(framework, tmp_path):
    path, policy = tmp_path / "run.events.jsonl", rules(recoveries=2)
    options = {"store": tmp_path / "store", "events": path}
    # A transient fault and one that stays; what the loop raises ends the run.
    loop = loop_of(framework, Faults(once=[8], always=[19]), policy)
    hooks = {"before": broken_at(27), "on_incident": wrong_then_right}
    with pytest.raises(RuntimeError, match="power"):
        train(loop, policy, range(40), **hooks, **options)
    # The newest checkpoint is damaged. Then the budget is spent.
    flip_a_bit(max((tmp_path / "store").glob("step-*")), seed=1)
    loop = loop_of(framework, Faults(always=range(28, 40)), policy)
    with pytest.raises(RunStopped):
        train(loop, policy, range(40), **options)
    # For alerts see tests/healer/test_actions.py.
    absent = {"save_failed", "problem", "assessment", "retried", "vote", "alert"}
    assert kinds_in(path) >= set(KINDS) - absent


def test_on_a_disk_that_cannot_be_written(tmp_path):
    path, store = tmp_path / "run.events.jsonl", tmp_path / "store"
    store.mkdir()
    loop = loop_of("torch", Faults(always=[19]))
    with read_only(store), pytest.raises(LastStateNotSaved):
        train(loop, rules(), range(24), store=store, events=path)
    assert [e["step"] for e in read(path).events if e["kind"] == "rollback"], "from memory"
    assert kinds_in(path) >= {"save_failed", "problem", "rollback", "end"}
