"""Which actions are carried out, and when: observing policies, hooks, rates after a rollback."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest
import torch

from healcore import Checkpoints, Healer, Hooks, Logging
from healcore import policy as policies
from healcore.core.decision import Action, Cause
from healcore.errors import HealerError, UnknownState
from healcore.policy import PolicyError
from healcore.runtime.faults.failures import FAILURES
from healcore.runtime.run.ending.exits import IncompleteRun
from healcore.torch.trainers import healings_of
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    SKIPS,
    Faults,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
)
from tests.runtime.faults.test_page import assert_on_the_page


@BOTH_FRAMEWORKS
def test_observe_changes_nothing_and_logs_the_same(framework, tmp_path):
    plain = loop_of(framework, Faults(always=[5, 23]))
    policy = rules(mode="observe")
    for number in range(30):
        plain.step(None, number)
    watched = loop_of(framework, Faults(always=[5, 23]), policy)
    facts = train(watched, policy, range(30), store=tmp_path)
    assert facts["rollbacks"] == 0
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
    facts = train(loop, rules(), range(40), store=tmp_path, on_incident=hook)
    assert facts["rollbacks"] == 0
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
    assert train(loop, "default", range(50), on_incident=add_save)["rollbacks"] == 0


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


def test_the_end_of_an_incident_has_the_numbers_of_its_optimizer(tmp_path):
    """The actor has the alarm, and steps only at even steps. `q` steps at every step."""
    model = torch.nn.Linear(1, 1)
    names = ("q", "actor")
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-9) for name in names}
    names_seen: list[set[str]] = []
    with Healer(SKIPS, state={"model": model, **optimizers}, store=tmp_path) as healer:
        for step in healer.batches(range(60)):
            for name, optimizer in optimizers.items():
                if name == "actor" and step % 2:
                    continue
                wanted = 1.0 if name == "q" else 2.0
                if name == "actor" and step == 30:
                    wanted = float("nan")
                loss = (model(torch.ones(1)) * 0).sum() + wanted
                healer.observe(loss, name)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            names_seen.append({name.split("/")[1] for name in healer.metrics()})
    (over,) = events(tmp_path, "over")
    assert over["onset"] == 30
    assert (over["engine"], over["readings"]["loss"]) == ("actor", 2.0)
    rows = [json.loads(line) for line in (tmp_path / "healcore.metrics.jsonl").open()]
    assert [row["engine"] for row in rows[:3]] == ["q", "actor", "q"]
    assert {(row["engine"], row["loss"]) for row in rows if row["step"] != 30} == {
        ("q", 1.0), ("actor", 2.0),
    }  # fmt: skip
    assert set().union(*names_seen) == {"q", "actor"}, "no name without the optimizer"


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


def test_used_where_it_cannot_be():
    loop = loop_of("torch")
    healer = Healer(rules(), state=loop.state)
    # Before the block.
    with pytest.raises(RuntimeError, match="with Healer"):
        healer.observe(1.0)
    with pytest.raises(IncompleteRun, match="no step"), healer:
        pass
    # After the block.
    with pytest.raises(RuntimeError, match="has ended"):
        next(healer.batches([1]))
    with pytest.raises(ValueError, match="epochs is a whole number >= 1, or None"):
        healer.batches([1], epochs=0)
    with pytest.raises(RuntimeError, match="opened once"), healer:
        pass
    # Arguments of other types.
    with pytest.raises(ValueError, match=r"hooks is a healcore.Hooks\(...\), not 3"):
        Healer(rules(), state=loop.state, hooks=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"store is a path, .* not ''"):
        Healer(rules(), state=loop.state, store="")
    with pytest.raises(ValueError, match="events is a path"):
        Logging(events=3)  # type: ignore[arg-type]
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


PLATEAU, OVERFIT = {"window": 5, "patience": 2}, {"max_gap": 0.5, "patience": 1}
ALERTS = policies.load(
    SKIPS,
    detect={"loss_spike": {"window": 20}, "plateau": PLATEAU, "overfit": OVERFIT},
    respond=[
        {"to": ["nonfinite"], "do": ["skip", "alert"]},
        {"to": ["plateau", "overfit", "loss_spike"], "do": ["alert"]},
    ],
)


@pytest.mark.parametrize("cause", ["PLATEAU", "OVERFIT", "NONFINITE_LOSS", "LOSS_SPIKE"])
def test_an_alert_names_severity_diagnosis_action_and_reference(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    losses = [3.0 - 0.05 * step for step in range(40)]
    if cause == "LOSS_SPIKE":
        losses[35] = 40.0
    if cause == "PLATEAU":
        losses = [3.0] * 40
    if cause == "NONFINITE_LOSS":
        losses[30] = losses[31] = float("nan")
    tracked, contexts = [], []
    tracker = SimpleNamespace(metrics=lambda step, values: None, event=tracked.append)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    options: Any = {"hooks": Hooks(on_incident=contexts.append), "trackers": [tracker]}
    with Healer(ALERTS, state=state, store=tmp_path, **options) as healer:
        for wanted in healer.batches(losses):
            loss = (model(torch.ones(1)) * 0).sum() + wanted
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if cause == "OVERFIT" and healer.step == 35:
                healer.observe(eval_loss=9.0)
    mine = [each for each in events(tmp_path, "alert") if cause in each["cause"]]
    alert = mine[0]
    assert "ALERT" in alert["action"]
    assert [each["step"] - alert["step"] for each in mine] in ([0], [0, 9])
    assert alert["severity"] == ("error" if cause == "NONFINITE_LOSS" else "warning")
    assert alert["diagnosis"]
    assert alert["references"]
    assert [each for each in tracked if each["kind"] == "alert"] == mine
    assert_on_the_page(Cause[cause], capsys.readouterr().err, tmp_path)
    assert contexts[0].failures[0].severity == alert["severity"]
    assert set(contexts[0].failures[0].references) <= {*alert["references"]}


SPIKES = policies.load(
    SKIPS,
    detect={"loss_spike": {"window": 20}},
    respond=[
        {"to": ["nonfinite"], "do": ["skip", "alert"]},
        {"to": ["loss_spike"], "do": ["alert"]},
    ],
)


ALERTS_TOO = [
    {"to": ["nonfinite"], "do": ["skip", "alert"]},
    {"to": ["loss_spike", "plateau"], "do": ["alert"]},
]


def trains_on(losses: list[dict[str, float]], policy: Any = SPIKES, **options: Any) -> None:
    """A run whose optimizers, by name, see these losses."""
    model = torch.nn.Linear(1, 1)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-9) for name in losses[0]}
    with Healer(policy, state={"model": model, **optimizers}, **options) as healer:
        for wanted in healer.batches(losses):
            for name, optimizer in optimizers.items():
                loss = (model(torch.ones(1)) * 0).sum() + wanted[name]
                healer.observe(loss, name)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def spiked_lines(capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The steps with a line about a loss spike."""
    lines = capsys.readouterr().err.splitlines()
    return [int(e.split("step ")[1].split(":")[0]) for e in lines if ": loss spike" in e]


def falling(steps: int, spikes: dict[int, float]) -> list[float]:
    return [spikes.get(step, 3.0 - 0.001 * step) for step in range(steps)]


@pytest.mark.slow
def test_the_alert_of_each_fault_is_on_the_console_once(tmp_path, capsys):
    """Each is a fault of its own after `quiet_steps` (20) without an alarm."""
    spikes = {35: 40.0, 37: 45.0, 150: 61.0, 151: 257.0, 400: 50.0, 410: 50.0}
    trains_on([{"q": loss} for loss in falling(420, spikes)], store=tmp_path)
    assert [each["step"] for each in events(tmp_path, "alarm")] == [*spikes]
    assert spiked_lines(capsys) == [35, 150, 400]
    assert [each["step"] for each in events(tmp_path, "alert")] == [35, 150, 400]


@pytest.mark.slow
def test_a_fault_of_one_optimizer_is_not_hidden_by_those_of_another(tmp_path, capsys):
    actor, q = falling(160, {35: 40.0, 100: 40.0}), falling(160, {40: 61.0, 100: 61.0})
    losses = [{"actor": a, "q": b} for a, b in zip(actor, q, strict=True)]
    trains_on(losses, store=tmp_path)
    assert spiked_lines(capsys) == [35, 40, 100], "one line for one step"


@pytest.mark.slow
def test_many_faults_do_not_flood_the_console_and_a_larger_one_is_told(tmp_path, capsys):
    """The first ten, each power of two, and each whose loss is twice as high as in any line."""
    spikes = {60 * number: 40.0 for number in range(1, 21)} | {60 * 13: 90.0, 60 * 14: 95.0}
    trains_on([{"q": loss} for loss in falling(60 * 21, spikes)], store=tmp_path)
    alarms = [each["step"] for each in events(tmp_path, "alarm")]
    assert alarms == [*spikes], "each is an alarm"
    told = spiked_lines(capsys)
    assert told == [60 * number for number in (*range(1, 11), 13, 16)]
    assert [each["step"] for each in events(tmp_path, "alert")] == told


WATCHES = policies.load(
    SKIPS,
    detect={
        "grad_ceiling": {"ceiling": 100.0, "first_ratio": "none"},
        "vanishing": {"threshold": 1e-7}, "plateau": PLATEAU, "overfit": OVERFIT,
    },
    respond=[
        {"to": ["nonfinite"], "do": ["skip", "alert"]},
        {"to": ["grad_ceiling", "vanishing", "plateau", "overfit"], "do": ["alert"]},
    ],
)  # fmt: skip
FALLS = [3.0 - 0.05 * step for step in range(60)]


@pytest.mark.parametrize(
    ("losses", "norms", "wanted"),
    [
        # OVERFIT lasts from the evaluation on.
        (FALLS, {40: 1000.0}, {"OVERFIT": 20, "GRAD_SPIKE": 40}),
        (FALLS, {40: 1000.0, 41: 1000.0, 45: 1000.0}, {"OVERFIT": 20, "GRAD_SPIKE": 40}),
        # Both last: the gradients vanish, then the loss stays.
        (FALLS[:25] + FALLS[25:26] * 35, dict.fromkeys(range(60), 0.0), {
            "GRAD_VANISHING": 0, "OVERFIT": 20, "PLATEAU": 25,
        }),
    ],
)  # fmt: skip
def test_each_cause_that_begins_has_an_alert_while_another_lasts(losses, norms, wanted, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    tracked: list[Any] = []
    tracker: Any = SimpleNamespace(metrics=lambda step, values: None, event=tracked.append)
    state = {"model": torch.nn.ParameterList([weight]), "optimizer": optimizer}
    with Healer(WATCHES, state=state, store=tmp_path, trackers=[tracker]) as healer:
        for step, value in enumerate(healer.batches(losses)):
            norm = norms.get(step, 1.0)
            loss = norm * (weight - weight.detach()).sum() + value
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 19:
                healer.observe(eval_loss=9.0)
    alerts = events(tmp_path, "alert")
    assert [each["cause"] for each in alerts] == [[cause] for cause in wanted]
    for alert, first in zip(alerts, wanted.values(), strict=True):
        assert first <= alert["step"] <= first + 30
        assert alert["diagnosis"] == FAILURES[Cause[alert["cause"][0]]].diagnosis
    assert [each for each in tracked if each["kind"] == "alert"] == alerts


def test_the_advice_of_a_run_that_never_moved_is_told(tmp_path, capsys):
    """The loss of DPO stays at chance. The policy only alerts, so there is no incident."""
    plateau = {**PLATEAU, "chance_level": 0.6931, "chance_margin": 0.01}
    policy = policies.load(SPIKES, detect={"plateau": plateau}, respond=ALERTS_TOO)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Healer(policy, state={"m": model, "o": optimizer}, store=tmp_path) as healer:
        for _ in healer.batches(range(40)):
            loss = (model(torch.ones(1)) * 0).sum() + 0.6931
            healer.observe(loss)
            loss.backward()
            optimizer.step()
    report = healer.report()
    assert (report.converged, report.history) == (False, ())
    assert report.advice == (FAILURES[Cause.PLATEAU].diagnosis,)
    (found,) = postmortems(tmp_path)
    assert found["cause"] == ["PLATEAU"]
    printed = capsys.readouterr().err
    for text in (str(report), found["diagnosis"], printed):
        assert "a lower beta of DPO" in " ".join(text.split())
    assert "plateau at the end, since its first alarm at step 4" in printed.replace("\n", " ")


@pytest.mark.slow
def test_a_lasting_cause_hides_no_other_after_a_hundred_alarms(tmp_path, capsys):
    losses = [{"q": 3.0} for _ in range(160)] + [{"q": 40.0}] + [{"q": 3.0}] * 5
    policy = policies.load(SPIKES, detect={"plateau": PLATEAU}, respond=ALERTS_TOO)
    trains_on(losses, store=tmp_path, policy=policy)
    alerts = events(tmp_path, "alert")
    assert [each["cause"] for each in alerts] == [["PLATEAU"], ["LOSS_SPIKE"]]
    assert events(tmp_path, "alarm")[-1]["step"] == 160
    assert "more than 100 alarms outside of incidents" in capsys.readouterr().err


RESETS = policies.load(rules(), rollback={"reset_moments": True})


@pytest.mark.parametrize(
    ("framework", "resets"),
    [("torch", True), pytest.param("jax", True, marks=pytest.mark.slow), ("torch", False)],
)
def test_the_optimizer_has_only_the_steps_since_the_rollback(framework, resets, tmp_path):
    policy = RESETS if resets else rules()
    loop = loop_of(framework, Faults(always=[23]), policy)
    facts = train(loop, policy, range(40), store=tmp_path)
    (event,) = events(tmp_path, "rollback")
    assert event.get("moments_reset") is (True if resets else None)
    if framework == "torch":
        counts = [each["step"] for each in loop.optimizer.state.values()]
    else:
        counts = [optax.tree.get_all_with_path(loop.state, "count")[0][1]]
    since = event["checkpoint"] if resets else 0
    assert {int(count) for count in counts} == {facts["step"] - since}


def test_a_restart_resets_no_moments(tmp_path):
    breaks_off(loop_of("torch"), RESETS, range(12), at=7, store=tmp_path)
    loop = loop_of("torch")
    train(loop, RESETS, range(12), store=tmp_path)
    assert {int(each["step"]) for each in loop.optimizer.state.values()} == {12}


def test_an_optimizer_that_is_not_known_is_refused_before_the_run(tmp_path):
    own: Any = type("Own", (torch.optim.AdamW,), {"step": lambda self, closure=None: None})
    loop = loop_of("torch")
    loop.state["optimizer"] = own(loop.model.parameters(), lr=1e-2)
    del loop.state["scheduler"]
    with pytest.raises(PolicyError, match=r"rollback\.reset_moments = true[\s\S]*Own"):
        Healer(RESETS, state=loop.state, store=tmp_path).__enter__()


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


def spikes(alert_steps, store):
    """Steps of the alerts on isolated spikes of the loss, eight steps apart."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 1e-3)
    policy = policies.load("default", incident={"alert_steps": alert_steps})
    generator = torch.Generator().manual_seed(0)
    with Healer(policy, state={"w": weight, "o": optimizer}, store=store) as healer:
        for step in healer.steps(160):
            is_spike = step >= 100 and step % 8 == 4
            loss = weight.square().mean() * (1 + 0.1 * torch.rand((), generator=generator))
            healer.observe(loss * 100 if is_spike else loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    alarms = [e["step"] for e in events(store, "alarm")]
    return alarms, [e["step"] for e in events(store, "alert")]


def test_a_policy_value_says_how_many_isolated_spikes_are_alerted(tmp_path):
    alarms, alerts = spikes(0, tmp_path / "default")
    assert len(alarms) > 3
    assert alerts == alarms[:1], "each is within quiet_steps of the one before"
    assert spikes(1, tmp_path / "each") == (alarms, alarms)
