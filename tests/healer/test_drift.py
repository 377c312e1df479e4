"""A drift that no detector sees for a long time: checkpoints from before it are still there."""

from __future__ import annotations

from typing import Any

import pytest

from healcore import policy as policies
from tests.healer.killed_runs import is_poisoned, poison
from tests.healer.run_directory import events
from tests.healer.training_loops import RULES, loop_of, train

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
