"""The learning rate and the optimizers' moments after a rollback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore import Healer
from healcore import policy as policies
from healcore.policy import PolicyError
from tests.healer.run_directory import events, events_of
from tests.healer.run_options import grouped
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


RATE, CUT = 0.01, 0.25


def warm_up(step: int) -> float:
    return min(1.0, ((step + 1) / 40) ** 3)


def test_the_limit_of_the_cut_is_named_and_not_a_factor_that_is_not_in_force(tmp_path, capsys):
    """The cut at step 37 limits the rate to a quarter; at step 0 the schedule is lower anyway."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    options: dict[str, Any] = {"rollback": {"confirm": False, "probation": 20}, "save_every": 5}
    options |= {"incident": {"quiet_steps": 3}, "events": tmp_path / "run.events.jsonl"}
    three = {"to": ["nonfinite"], "do": ["rollback", "cut_lr"], "when": {"consecutive": 3}}
    options["respond"] = [{"to": ["nonfinite"], "do": ["skip"]}, three]
    state, rates = {"model": net, "optimizer": optimizer, "schedule": schedule}, {}
    with Healer("default", state=state, **grouped(options)) as healer:
        driver: Any = healer._loop.driver
        for batch in healer.batches([torch.randn(8, 4) for _ in range(70)]):
            step = healer.step
            optimizer.zero_grad()
            loss = ((net(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
            if step in (35, 36, 37, 38) and not healer.rollbacks:
                loss = loss * float("nan")
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            decision = driver.healings["optimizer"].last_decision()
            rates[step] = optimizer.param_groups[0]["lr"] * float(decision.lr_scale)
            schedule.step()
        (done,) = healer.report().rollbacks
    limit = CUT * RATE * warm_up(37)
    assert (done.step, done.target, done.lr_scale) == (39, 0, 1.0)
    assert (done.lr, done.lr_limit) == pytest.approx((RATE, limit))
    assert max(rates.values()) == pytest.approx(limit), "no step after it has had more"
    assert rates[1] == pytest.approx(RATE * warm_up(1)), "and the first ones their schedule's"
    found = events_of(options["events"])
    (back,) = (each for each in found if each["kind"] == "rollback")
    assert (back["lr"], back["lr_limit"], back["lr_scale"]) == (done.lr, done.lr_limit, 1.0)
    first, second = (each for each in found if each["kind"] == "lr")
    assert (first["step"], first["action"], first["lr_scale"]) == (37, ["CUT_LR"], CUT)
    assert ("action" in second, second["lr_scale_before"]) == (False, 1.0)
    assert RATE * warm_up(second["step"] - 1) < limit < RATE * warm_up(second["step"])
    (line,) = (e for e in capsys.readouterr().err.splitlines() if "back to the checkpoint" in e)
    assert f"learning rate at most {limit:.3g} (the schedule had come to 0.01)" in line
    assert "data rewound" in line
    assert "×" not in line
