"""`rollback.reset_moments`: the optimizer begins again at a rollback."""

from typing import Any

import optax
import pytest
import torch

from healcore import Healer
from healcore import policy as policies
from healcore.policy import PolicyError
from tests.healer.run_directory import events
from tests.healer.training_loops import (
    JAX,
    Faults,
    breaks_off,
    loop_of,
    rules,
    train,
)

RESETS = policies.load(rules(), rollback={"reset_moments": True})


def steps_of_optimizer(loop: Any) -> set[int]:
    """The steps that Adam has counted, of all its arrays."""
    if loop.framework == "torch":
        return {int(state["step"]) for state in loop.optimizer.state.values()}
    ((_, count), *_) = optax.tree.get_all_with_path(loop.state, "count")
    return {int(count)}


@pytest.mark.parametrize("framework", ["torch", JAX])
def test_the_optimizer_has_only_the_steps_since_the_rollback(framework, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), RESETS)
    result = train(loop, RESETS, range(40), store=tmp_path)
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["moments_reset"] is True
    assert steps_of_optimizer(loop) == {result.step - rollback["checkpoint"]}


def test_the_optimizer_keeps_its_steps_by_default(tmp_path):
    loop = loop_of("torch", Faults(always=[23]))
    result = train(loop, rules(), range(40), store=tmp_path)
    (rollback,) = events(tmp_path, "rollback")
    assert "moments_reset" not in rollback
    assert steps_of_optimizer(loop) == {result.step}


def test_a_restart_resets_no_moments(tmp_path):
    breaks_off(loop_of("torch"), RESETS, range(12), at=7, store=tmp_path)
    loop = loop_of("torch")
    train(loop, RESETS, range(12), store=tmp_path)
    assert steps_of_optimizer(loop) == {12}


class OwnAdamW(torch.optim.AdamW):
    """An optimizer whose own step may keep anything in its state."""

    def step(self, closure: Any = None) -> None: ...


def test_an_optimizer_that_is_not_known_is_refused_before_the_run(tmp_path):
    loop = loop_of("torch")
    state = {"model": loop.model, "optimizer": OwnAdamW(loop.model.parameters(), lr=1e-2)}
    with pytest.raises(PolicyError, match=r"rollback\.reset_moments = true[\s\S]*OwnAdamW"):
        Healer(RESETS, state=state, store=tmp_path).__enter__()
