"""Steps that are judged after they were taken end as steps that are judged in them.

Both engines train the same model on the same gradients: `host` decides in the step, `device` tests
in the step whether it is finite, and judges it later.
"""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import healcore.policy as policies
from healcore.torch import attach
from healcore.torch.live_engine import RECORD_LAG

GRADS = (1.0, 1.0, 1.0, 3.0, 50.0, float("nan"), float("inf"), 1e16, 0.0)
"""What the gradients of a step are multiplied by."""
LOSSES = (1.0, 1.0, 1.2, 30.0, float("nan"), float("inf"), None)
CLIP = {"max_norm": 0.5}


class Loop:
    """A small model whose gradients and losses are drawn."""

    def __init__(self, policy: Any, engine: Any, *, dtype: torch.dtype = torch.float32, **kw: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.heal = attach(self.optimizer, policy, engine=engine, **kw)
        self.random = random.Random(3)

    def step(self) -> None:
        draw = torch.Generator().manual_seed(self.random.randrange(1000))
        factor, loss = self.random.choice(GRADS), self.random.choice(LOSSES)
        for p in self.model.parameters():
            p.grad = (torch.randn(p.shape, generator=draw) * factor).to(p.dtype)
        if loss is not None:
            self.heal.observe(loss)
        self.optimizer.step()

    def weights(self) -> bytes:
        parts = [p.detach().float().numpy() for p in self.model.parameters()]
        return b"".join(map(np.ndarray.tobytes, parts))

    def state(self) -> str:
        return json.dumps(self.heal.state_dict())


def is_late(loop: Loop) -> bool:
    return loop.heal.live_engine.judges_late


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("clip", [None, CLIP], ids=["no clip", "clip"])
@pytest.mark.parametrize("policy", ["default", "observe"])
def test_the_run_and_the_state_are_the_same(policy, clip, dtype):
    given = {} if clip is None else {"clip": clip}
    late = Loop(policy, "device", dtype=dtype, **given)
    at_once = Loop(policy, "host", dtype=dtype, **given)
    assert is_late(late)
    for number in range(4 * RECORD_LAG):
        late.step()
        at_once.step()
        assert late.weights() == at_once.weights(), number
        if number % 7 == 0:  # reading it in between changes nothing
            assert late.state() == at_once.state()
            assert late.heal.last_decision() == at_once.heal.last_decision()
    assert late.state() == at_once.state()


def test_a_change_is_expected_from_the_step_after_the_call():
    late, at_once = Loop("default", "device"), Loop("default", "host")
    for _ in range(5):
        for loop in (late, at_once):
            loop.step()
            loop.heal.expect_change()
            loop.step()
    assert late.state() == at_once.state()


@pytest.mark.parametrize("policy", ["zclip", "pretraining", "autoclip", "conservative"])
def test_a_policy_that_decides_by_its_state_judges_in_the_step(policy):
    assert not is_late(Loop(policy, "device"))


def test_a_limit_of_a_rollback_is_applied_in_the_step_until_it_is_gone():
    late, at_once = Loop("default", "device"), Loop("default", "host")
    for loop in (late, at_once):
        loop.step()
        engine = loop.heal.engine
        state = engine.from_dict(loop.heal.state_dict())
        limited = engine.limit_norm(state, np.float32(0.25))
        loop.heal.load_state_dict(engine.to_dict(limited))
    assert not is_late(late)
    for _ in range(6):
        late.step()
        at_once.step()
    assert late.weights() == at_once.weights()
    for loop in (late, at_once):
        engine = loop.heal.engine
        state = engine.from_dict(loop.heal.state_dict())
        loop.heal.load_state_dict(engine.to_dict(engine.limit_norm(state, None)))
    assert is_late(late)
    for _ in range(6):
        late.step()
        at_once.step()
    assert (late.weights(), late.state()) == (at_once.weights(), at_once.state())


def test_a_rule_that_does_not_skip_at_once_decides_by_its_state():
    rule = {"to": ["nonfinite"], "when": {"consecutive": 2}, "do": ["skip"]}
    policy = policies.load("default", respond=[rule])
    assert not policy.engine().specialised_for(policy.engine().init()).tests_only_finite


def test_records_that_are_read_late_or_out_of_order_are_those_of_their_steps():
    late, at_once = Loop("default", "device"), Loop("default", "host")
    records: dict[str, list[Any]] = {"late": [], "at once": []}
    for _ in range(2 * RECORD_LAG):
        for name, loop in (("late", late), ("at once", at_once)):
            loop.step()
            records[name].append(loop.heal.live_engine.pending_record("AdamW"))
    order = [*range(15, 20), *range(15)]
    for place in order:
        assert repr(records["late"][place]()) == repr(records["at once"][place]())
