"""Which actions are carried out, and when: observing policies, hooks, rates after a rollback."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from healcore import Checkpoints, Healer, Logging
from healcore import policy as policies
from healcore.core.decision import Action
from healcore.errors import HealerError, UnknownState
from healcore.runtime.run.ending.exits import IncompleteRun
from healcore.torch.trainers import healings_of
from tests.healer.run_directory import events
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    SKIPS,
    Faults,
    loop_of,
    rules,
    same,
    train,
)


@BOTH_FRAMEWORKS
def test_observe_changes_nothing_and_logs_the_same(framework, tmp_path):
    plain = loop_of(framework, Faults(always=[5, 23]))
    policy = rules(mode="observe")
    for number in range(30):
        plain.step(None, number)
    watched = loop_of(framework, Faults(always=[5, 23]), policy)
    result = train(watched, policy, range(30), store=tmp_path)
    assert result.rollbacks == 0
    assert same(watched.weights(), plain.weights())
    orders = events(tmp_path, "order")
    assert all(order["observed"] for order in orders)
    assert "ROLLBACK" in orders[0]["action"]
    assert events(tmp_path, "rollback") == []


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


@pytest.mark.slow
def test_gradients_of_an_optimizer_that_no_longer_steps_do_not_prevent_comparisons():
    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (body, head)]
    state = {"a": body, "b": head, "opt_a": optimizers[0], "opt_b": optimizers[1]}
    calls = []

    def loss_fn(inputs):
        calls.append(healer.step)
        return head(body(inputs)).square().mean()

    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for inputs in healer.batches(list(torch.randn(400, 8, 4))):
            healer.loss(inputs * 50 if healer.step == 360 else inputs).backward()
            for optimizer in optimizers[healer.step > 20 :]:
                optimizer.step()
            optimizers[1].zero_grad()
    assert sum(step >= 360 for step in calls) > 40, "the loop's own calls alone"


def test_two_optimizers_are_one_run(tmp_path):
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    state = {"a": models[0], "b": models[1], "opt_a": optimizers[0], "opt_b": optimizers[1]}
    faults = Faults(always=[23])
    with Healer(rules(), state=state, store=tmp_path, checkpoints=Checkpoints(every=5)) as healer:
        for number in healer.batches(range(40)):
            inputs, targets = map(torch.from_numpy, faults.batch(number))
            for name, model in zip(("opt_a", "opt_b"), models, strict=True):
                loss = (model(inputs) - (targets if name == "opt_b" else inputs[:, :1])).square()
                healer.observe(loss.mean(), name)
                loss.mean().backward()
                state[name].step()
                state[name].zero_grad()
        assert healer.step == 39
        assert healer.rollbacks == 1
    (alarm,) = events(tmp_path, "alarm")
    assert alarm["engine"] == "opt_b"


def test_methods_that_are_called_outside_of_the_block_say_so():
    loop = loop_of("torch")
    healer = Healer(rules(), state=loop.state)
    with pytest.raises(RuntimeError, match="with Healer"):
        healer.observe(1.0)
    with healer:
        for number in healer.batches(range(2)):
            loop.step(healer, number)
    with pytest.raises(RuntimeError, match="has ended"):
        next(healer.batches([1]))
    with pytest.raises(RuntimeError, match="opened once"), healer:
        pass


@pytest.mark.parametrize(
    ("framework", "method", "arguments", "advice"),
    [
        ("torch", "update", {"state": None}, "healer.after_step()"),
        ("torch", "scan", {"update": None, "state": None, "steps": 5, "every": 5}, "healer.steps"),
        ("jax", "loss", {"batch": 1}, "value=loss"),
        ("jax", "observe", {"loss": 1.0}, "value=loss"),
    ],
)
def test_a_method_of_the_other_framework_says_what_to_write(framework, method, arguments, advice):
    def loss_fn(*given: Any) -> Any:
        raise AssertionError("a Healer calls loss_fn only after a step")

    loop = loop_of(framework, policy=rules())
    healer = Healer(rules(), state=loop.state, loss_fn=loss_fn)
    # The first is of the end of the block: the run has taken no step.
    with pytest.raises(IncompleteRun), healer, pytest.raises(HealerError) as raised:
        getattr(healer, method)(**arguments)
    message = str(raised.value)
    wanted, given = ("JAX", "torch") if framework == "torch" else ("torch", "JAX")
    assert f"healer.{method}(" in message
    assert f"is for {wanted}, and the state of this Healer is of {given}: " in message
    assert advice in message


def test_arguments_of_other_types_are_refused():
    state = loop_of("torch").state
    with pytest.raises(ValueError, match=r"hooks is a healcore.Hooks\(...\), not 3"):
        Healer(rules(), state=state, hooks=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"store is a path, .* not ''"):
        Healer(rules(), state=state, store="")
    with pytest.raises(ValueError, match="events is a path"):
        Logging(events=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epochs is a whole number >= 1, or None"):
        Healer(rules(), state=state).batches([1], epochs=0)
    with pytest.raises((TypeError, ValueError), match=r"nothing of torch|no healing state"):
        Healer(rules(), state={}).__enter__()
    in_jax = loop_of("jax", policy=rules()).state
    with pytest.raises(
        UnknownState, match=r"\(engine\), and this state is of jax: pass no `attach`"
    ):
        Healer(rules(), state=in_jax, attach={"engine": "host"}).__enter__()


@BOTH_FRAMEWORKS
def test_a_run_writes_down_the_policy_with_its_values_replaced(framework, tmp_path):
    replaced = {"rollback": {"probation": 3}, "max_skips": 2}
    policy = policies.load(SKIPS, **replaced)
    train(loop_of(framework, policy=policy), SKIPS, range(4), store=tmp_path, **replaced)
    (start,) = events(tmp_path, "start")
    assert policies.loads(start["policy_toml"]) == policy
    assert start["fingerprint"] == policies.fingerprint(policy) != policies.fingerprint(SKIPS)


@BOTH_FRAMEWORKS
def test_hooks_receive_saves_and_rollbacks_and_the_report_is_a_plain_dict(framework, tmp_path):
    """The host reads a step one step later: the bad step is 23, and the rollback begins at 25."""
    saved, rolled_back, running = [], [], []

    def broken(event):
        raise RuntimeError("a hook of the user")

    def before(healer, number):
        running[:] = [healer, healer.report().ending]

    loop = loop_of(framework, Faults(always=[23]), rules())
    hooks = {"on_saved": [broken, saved.append], "on_rollback": rolled_back.append}
    train(loop, rules(), range(40), store=tmp_path, before=before, **hooks)

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

    # The report is plain JSON, during the run and after it.
    report = running[0].report()
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert (running[1], found["ending"], found["converged"]) == ("running", "completed", True)
    assert (found["steps"], found["attempts"]) == (39, 1)
    assert (found["counts"]["NONFINITE_LOSS"], found["counts"]["skips"]) == (1, 1)
    assert found["rollbacks"][0]["target"] == logged["checkpoint"]
    assert found["history"][0]["onset"] == 23
    assert "completed at step 39" in str(report)


def test_the_limit_of_the_cut_is_named_and_not_a_factor_that_is_not_in_force(tmp_path, capsys):
    """The cut at step 37 limits the rate to a quarter; at step 0 the schedule is lower anyway."""
    rate, cut = 0.01, 0.25

    def warm_up(step: int) -> float:
        return min(1.0, ((step + 1) / 40) ** 3)

    loop = loop_of("torch", Faults(once=range(35, 39)))
    rates = {}
    healers = []
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, warm_up)
    loop.state["scheduler"] = loop.scheduler
    three = {"to": ["nonfinite"], "do": ["rollback", "cut_lr"], "when": {"consecutive": 3}}
    policy = policies.load(
        "default",
        rollback={"confirm": False, "probation": 20},
        incident={"quiet_steps": 3},
        respond=[{"to": ["nonfinite"], "do": ["skip"]}, three],
    )

    def before(healer: Any, number: int) -> None:
        healers[:] = [healer]
        step = healer.step - 1
        decision = healings_of(healer)["optimizer"].last_decision()
        if decision is not None:  # after the first step
            rates[step] = rate * warm_up(step) * float(decision.lr_scale)

    train(loop, policy, range(70), events=tmp_path / "healcore.events.jsonl", before=before)

    # The report: the limit is a quarter of the schedule's rate at the cut.
    (done,) = healers[0].report().rollbacks
    limit = cut * rate * warm_up(37)
    assert (done.step, done.continues_at, done.lr_scale) == (39, 0, 1.0)
    assert (done.lr, done.lr_limit) == pytest.approx((rate, limit))

    # The rates that the steps had.
    assert max(rates.values()) == pytest.approx(limit), "no step after it has had more"
    assert rates[1] == pytest.approx(rate * warm_up(1)), "and the first ones their schedule's"

    # The events.
    (back,) = events(tmp_path, "rollback")
    assert (back["lr"], back["lr_limit"], back["lr_scale"]) == (done.lr, done.lr_limit, 1.0)
    first, second = events(tmp_path, "lr")
    assert (first["step"], first["action"], first["lr_scale"]) == (37, ["CUT_LR"], cut)
    assert ("action" in second, second["lr_scale_before"]) == (False, 1.0)
    assert rate * warm_up(second["step"] - 1) < limit < rate * warm_up(second["step"])

    # The line on the screen.
    (line,) = (e for e in capsys.readouterr().err.splitlines() if "to the checkpoint of" in e)
    assert f"learning rate at most {limit:.3g} (the schedule's rate was 0.01)" in line
    assert "data rewound" in line
    assert "×" not in line
