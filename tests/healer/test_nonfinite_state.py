"""NaN in the state that no step showed: a save finds it, and the policy decides."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from healcore import policy as policies
from healcore.runtime.healer import Healer
from healcore.runtime.loop.termination import RunStopped
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import RULES, Faults, broken_at, loop_of, rules, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def policy_with(what: str) -> Any:
    text = RULES.format(cut="", skip_batches=0, recoveries=3)
    return policies.loads(text.replace("[rollback]", f'[rollback]\nnonfinite_state = "{what}"'))


class Spoils:
    """Makes an array that no loss depends on NaN, at some batches."""

    def __init__(self, framework: str, policy: Any, at: Any) -> None:
        self.loop = loop_of(framework, Faults(), policy)
        self._at = set(at)
        self.batches: list[int] = []
        if framework == "torch":
            self.loop.model.register_buffer("seen", torch.zeros(3))
        else:
            self.loop.state["seen"] = jnp.zeros(3)
            step = self.loop._step

            def kept(state: Any, *batch: Any) -> Any:
                seen = state["seen"]
                rest = step({k: v for k, v in state.items() if k != "seen"}, *batch)
                return {**rest, "seen": seen}

            self.loop._step = kept

    def before(self, healer: Any, number: int) -> None:
        self.batches.append(number)
        if number not in self._at:
            return
        if self.loop.framework == "torch":
            self.loop.model.seen[1] = float("nan")
        else:
            healer.state["seen"] = jnp.full(3, jnp.nan)


@BOTH
def test_the_run_goes_back_by_default(framework, tmp_path):
    it = Spoils(framework, rules(), at=[22])
    facts = train(it.loop, rules(), range(60), store=tmp_path, before=it.before)
    (logged,) = events(tmp_path, "rollback")
    assert logged["onset"] == 24, "the checkpoint of step 25 has it"
    assert logged["checkpoint"] in (15, 20)
    assert it.batches.count(22) == 1, "the data of those steps are left out"
    order = events(tmp_path, "order")[0]
    assert (order["action"], order["step"]) == (["ROLLBACK"], 29), "the last judged step"
    assert "seen" in order["why"]
    assert facts["good"] > 30
    (after,) = postmortems(tmp_path)
    assert "NaN or Inf in" in after["diagnosis"]
    assert "step 25" in after["diagnosis"]


@BOTH
def test_a_run_does_not_end_with_weights_that_broke_in_its_last_steps(framework, tmp_path):
    """Three skipped steps order no rollback, and no save is due any more."""
    policy = policies.load("default", rollback={"probation": 5})
    loop, broken = loop_of(framework, Faults(), policy), []

    def spoil(healer: Healer, number: int) -> None:
        if number == 57 and not broken:
            broken.append(number)
            if framework == "torch":
                with torch.no_grad():
                    loop.model[0].weight[0, 0] = float("nan")
            else:
                params = healer.state["params"]
                healer.state["params"] = {**params, "w1": params["w1"].at[0, 0].set(jnp.nan)}

    facts = train(loop, policy, range(60), store=tmp_path, before=spoil)
    assert broken
    assert facts["rollbacks"] == 1
    (logged,) = events(tmp_path, "rollback")
    assert logged["checkpoint"] == 50
    weights = [np.asarray(each) for each in loop.weights()]
    assert all(np.isfinite(each).all() for each in weights)


def poisoned_by(batch: int, what: str, value: float, framework: str, policy: Any) -> Any:
    """A loop in which the end of a batch's step spoils the weights, or statistics for the loss."""
    loop = Spoils(framework, policy, at=[]).loop
    step, number_now = loop.step, [-1]

    def spoiling_step(healer: Any, number: int) -> None:
        seen = loop.model.seen if framework == "torch" else healer.state["seen"]
        loop.faults.always = frozenset() if np.isfinite(np.asarray(seen)).all() else {number}
        number_now[0] = number
        step(healer, number)
        if framework == "torch" and number == batch:
            (loop.model[0].weight if what == "weights" else seen).data.fill_(value)

    loop.step = spoiling_step
    if framework == "jax":
        jitted = loop._step

        def spoiling(state: Any, *data: Any) -> Any:
            new = jitted(state, *data)
            if number_now[0] == batch:
                params = {**new["params"], "w1": jnp.full((4, 8), value)}
                new |= {"params": params} if what == "weights" else {"seen": jnp.full(3, value)}
            return new

        loop._step = spoiling
    return loop


@BOTH
@pytest.mark.parametrize("preset", ["default", "test"])
@pytest.mark.parametrize(
    ("what", "value"), [("weights", np.nan), ("weights", np.inf), ("statistics", np.nan)]
)
@pytest.mark.parametrize("batch", [49, 57], ids=["a save sees it", "no save sees it"])
def test_a_rollback_skips_the_batch_after_which_the_state_was_not_finite(
    batch, what, value, preset, framework, tmp_path
):
    """One rollback: a save that saw the undone damage is no news on the repeated steps."""
    policy = rules() if preset == "test" else policies.load("default", rollback={"probation": 5})
    loop = poisoned_by(batch, what, value, framework, policy)
    facts = train(loop, policy, range(100), store=tmp_path, save_every=25)
    (logged,) = events(tmp_path, "rollback")
    assert (logged["onset"], logged["batches"][:2]) == (batch, [[0, batch], [0, batch + 1]])
    assert facts["step"] == 100 - len(logged["batches"])


@BOTH
def test_it_stops_or_only_alerts_if_the_policy_orders_it(framework, tmp_path):
    it, policy = Spoils(framework, policy_with("stop"), at=[22]), policy_with("stop")
    with pytest.raises(RunStopped, match="NaN or Inf in"):
        train(it.loop, policy, range(60), store=tmp_path / "stop", before=it.before)
    it, policy = Spoils(framework, policy_with("alert"), at=[22]), policy_with("alert")
    facts = train(it.loop, policy, range(60), store=tmp_path, before=it.before)
    assert (facts["rollbacks"], facts["step"]) == (0, 60)
    assert events(tmp_path, "order")[0]["action"] == ["ALERT"]
    assert "The run ends in that state" in postmortems(tmp_path)[0]["diagnosis"]


@BOTH
def test_harmless_nonfinite_arrays_are_rolled_back_once(framework, tmp_path):
    """A buffer that is infinite by design, or a logged number; the weights are finite."""
    it = Spoils(framework, rules(), at=range(22, 100))
    facts = train(it.loop, rules(), range(60), store=tmp_path, before=it.before)
    assert facts["rollbacks"] == 1
    assert any("nonfinite_ok" in each["problem"] for each in events(tmp_path, "problem"))


def test_a_mask_of_minus_infinity_is_allowed_after_a_restart_too(tmp_path):
    def loop():
        made = loop_of("torch")
        made.model.register_buffer("mask", torch.full((3,), -torch.inf))
        return made

    with pytest.raises(RuntimeError, match="power"):
        train(loop(), rules(), range(40), store=tmp_path, before=broken_at(27))
    assert "model.mask" in events(tmp_path, "problem")[0]["problem"]
    assert events(tmp_path, "good")
    assert train(loop(), rules(), range(40), store=tmp_path)["good"]
    assert events(tmp_path, "resume")[0]["checkpoint"] == 25
