"""What hooks receive, and which orders they may replace."""

from typing import Any

import numpy as np

from healcore.core.decision import Action
from tests.healer.run_directory import events
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, train


def test_a_hook_may_override(tmp_path):
    seen = []

    def hook(incident):
        seen.append(incident)
        return Action(0)

    loop = loop_of("torch", Faults(always=[23]))
    result = train(loop, rules(), range(40), store=tmp_path, on_incident=hook)
    assert result.rollbacks == 0
    assert seen[0].step == 23
    assert seen[0].action & Action.ROLLBACK
    assert seen[0].batches == ((0, 23),)
    assert "0.weight" in {each.name for each in seen[0].evidence}
    assert events(tmp_path, "hook")[0]["action"] == []


def test_a_hook_that_adds_a_save_is_no_evidence():
    """Weights that are finite after skipped steps are not rolled back."""

    def add_save(incident: Any) -> Action:
        return incident.action | Action.SAVE

    loop = loop_of("torch", Faults(always=range(20, 32)))
    assert train(loop, "default", range(50), on_incident=add_save).rollbacks == 0


@BOTH_FRAMEWORKS
def test_hooks_receive_saves_and_rollbacks(framework, tmp_path):
    """The host reads a step one step later: the bad step is 23, and the rollback begins at 25."""
    saved, rolled_back = [], []

    def broken(event: Any) -> None:
        raise RuntimeError("a hook of the user")

    loop = loop_of(framework, Faults(always=[23]), rules())
    hooks = {"on_saved": [broken, saved.append], "on_rollback": rolled_back.append}
    train(loop, rules(), range(40), store=tmp_path, **hooks)

    # The hook of the rollback has received what the event says.
    (logged,) = events(tmp_path, "rollback")
    (seen,) = rolled_back
    assert (seen["kind"], seen["checkpoint"]) == ("rollback", logged["checkpoint"])
    for each in (seen, logged):
        assert (each["step"], each["onset"], each["batches"]) == (25, 23, [[0, 23]])

    # The hook of the saves too, although the hook before it raises each time.
    assert [each["step"] for each in saved] == [each["step"] for each in events(tmp_path, "save")]
    problems = [each["problem"] for each in events(tmp_path, "problem")]
    assert sum("a hook of the user" in each for each in problems) == len(saved)
    assert all(np.isfinite(each).all() for each in loop.weights())
