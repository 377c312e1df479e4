"""A rollback that resets the optimizers' moments, through crashes and where it cannot be done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore import policy as policies
from healcore.policy import PolicyError
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, rules, train

RESETS = policies.load(rules(), rollback={"reset_moments": True})


def adam_steps(loop: Any) -> int:
    """Steps that the bias correction of the loop's AdamW counts."""
    if loop.framework == "torch":
        (steps,) = {int(each["step"]) for each in loop.optimizer.state.values()}
        return steps
    import optax

    return int(optax.tree.get_all_with_path(loop.state, "count")[0][1])


@pytest.mark.parametrize(
    ("framework", "policy"),
    [("torch", RESETS), ("jax", RESETS), ("torch", rules())],
    ids=["torch", "jax", "off"],
)
def test_the_optimizer_has_only_the_steps_since_the_rollback(framework, policy, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), policy)
    facts = train(loop, policy, range(40), store=tmp_path)
    (event,) = events(tmp_path, "rollback")
    since = facts["step"] - event["checkpoint"]
    assert event.get("moments_reset") is (True if policy is RESETS else None)
    assert adam_steps(loop) == (since if policy is RESETS else facts["step"])


def test_an_optimizer_that_is_not_known_is_refused_before_the_run(tmp_path):
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    loop = loop_of("torch")
    loop.state["optimizer"] = Own(loop.model.parameters(), lr=1e-2)
    del loop.state["scheduler"]
    with pytest.raises(PolicyError, match=r"rollback\.reset_moments = true[\s\S]*Own"):
        Healer(RESETS, state=loop.state, store=tmp_path).__enter__()
