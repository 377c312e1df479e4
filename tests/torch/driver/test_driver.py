"""Which states the driver accepts, when it may save, and the records of its steps."""

import shutil
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

import healcore
from healcore.core.decision import Action, Cause
from healcore.core.detectors import OverfitConfig
from healcore.core.engine import Engine, EngineConfig
from healcore.core.step_record import Why
from healcore.errors import SignalError
from healcore.torch import AttachError, attach
from healcore.torch.driver import TorchDriver
from healcore.torch.driver.followed_optimizer import MAX_PENDING
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.driver.small_run import CLIPS, NAN, ROLLS_BACK, SmallTorchRun, single_record
from tests.torch.optimizer_cases import host_and_device


def driven(where: str = "host") -> tuple[SmallTorchRun, TorchDriver]:
    run = SmallTorchRun(partial(AdamW, lr=0.01, fused=True))
    return run, TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})


def model_and(**more: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, **{k: f(optimizer) for k, f in more.items()}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(None, "NoneType", id="no state"),
        pytest.param({"model": nn.Linear(2, 2)}, "Optimizer", id="no optimizer"),
        pytest.param(
            model_and(heal=lambda o: attach(o, ROLLS_BACK)), "attach", id="attached before"
        ),
        pytest.param({"optimizer": model_and()["optimizer"]}, "parameters", id="no model"),
        pytest.param(
            model_and(model=lambda o: nn.Linear(2, 2)), "not in the state", id="another model"
        ),
        pytest.param(model_and(epoch=lambda o: 3), "dictionary", id="a number"),
        pytest.param(
            model_and(loader=lambda o: SimpleNamespace(state_dict=dict)),
            "load_state_dict",
            id="no load_state_dict",
        ),
        pytest.param(
            model_and(model=lambda o: nn.LazyLinear(2)), "not in the state", id="lazy parameters"
        ),
    ],
)
def test_a_state_that_cannot_be_healed_is_rejected(state, message):
    with pytest.raises(AttachError, match=message):
        TorchDriver(state, ROLLS_BACK)


def test_a_scheduler_that_is_not_in_the_state_has_a_warning():
    state = model_and(scheduler=lambda o: ExponentialLR(o, 0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchDriver(state, ROLLS_BACK).close()
        del state["scheduler"]
        with pytest.raises(UserWarning, match="optimizer"):
            TorchDriver(state, ROLLS_BACK)


def test_an_existing_handle_is_used_and_stays():
    state = model_and()
    heal = attach(state["optimizer"], CLIPS)
    first = model_and()
    with pytest.raises(AttachError, match=r"under another policy .*clip\.max_norm: "):
        TorchDriver({**first, "b": state["model"], "second": state["optimizer"]}, ROLLS_BACK)
    assert not first["optimizer"]._optimizer_step_pre_hooks, "nothing was changed"
    driver = TorchDriver(state, CLIPS)
    assert driver.healings == {"optimizer": heal}
    with pytest.raises(AttachError, match="still open"):
        TorchDriver(state, CLIPS)
    driver.close()
    assert heal.healed_step.attached
    TorchDriver(state, CLIPS).close()


def test_losses_go_to_all_optimizers_or_to_one_and_each_step_has_a_record():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"a": a, "b": b, "one": SGD(a.parameters()), "two": SGD(b.parameters())}
    driver = TorchDriver(state, ROLLS_BACK)

    def judged() -> list[Any]:
        parts = []
        for module, name in ((a, "one"), (b, "two"), (a, "one")):
            module(torch.ones(1)).backward()
            state[name].step()
            parts.append(driver.is_interrupted())
        assert parts == [True, False, False], "an exception here leaves half a step, as of a GAN"
        handle: Any = driver.take_dispatch()
        return [(record.engine, record.step, record.loss) for record in handle.read()[0]]

    driver.observe(2.0)
    assert judged() == [("one", 1, 2.0), ("two", 1, 2.0), ("one", 2, 2.0)]
    driver.observe(3.0, "one")
    driver.observe(torch.tensor(4.0), state["two"])
    assert judged() == [("one", 3, 3.0), ("two", 2, 4.0), ("one", 4, 3.0)]
    driver.observe_eval(5.0, "two")
    with pytest.raises(AttachError, match="'three'"):
        driver.observe(1.0, "three")
    with pytest.raises(SignalError):
        driver.observe(torch.ones(2))


@pytest.mark.slow
def test_each_of_many_steps_per_batch_has_its_record():
    """As in PPO with many epochs over a rollout: a skip among the first of them is counted."""
    run, driver = driven()
    for i in range(3 * MAX_PENDING):
        run.step(i, NAN if i == 5 else 1.0)
    (records,) = driver.take_dispatch().read()  # type: ignore[union-attr]
    assert [each.step for each in records] == [*range(1, 3 * MAX_PENDING + 1)]
    assert [i for i, each in enumerate(records) if not each.taken] == [5]
    assert driver.take_dispatch() is None


def run(kind, folder, interrupt=-1):
    """Steps of the checkpoints, and weights. Unless it accumulates, `first` stops after step 20."""
    torch.manual_seed(0)
    data = list(torch.randn(80, 6, 4))
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    model = nn.Sequential(body, nn.Tanh(), head)
    both = [*body.parameters(), *head.parameters()]
    first = torch.optim.Adam(head.parameters(), 1e-3)
    second = torch.optim.SGD(both if kind == "two stages" else body.parameters(), 1e-2)
    state = {"model": model, "first": first, "second": second}
    checkpoints = healcore.Checkpoints(every=10, keep=healcore.Keep(candidates=20))
    with healcore.Healer("default", state=state, store=folder, checkpoints=checkpoints) as healer:
        for x in healer.batches(data):
            if healer.step == interrupt:
                raise KeyboardInterrupt
            stepping = [first if healer.step < 20 else second]
            cleared = [second] if kind == "frozen network" else stepping  # those of `first` remain
            if kind == "accumulates":
                stepping = [second, first] if healer.step % 4 == 3 else [second]
                cleared = []
            for each in cleared:
                each.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            healer.observe(loss)
            loss.backward()
            for each in stepping:
                each.step()
                if kind == "accumulates":
                    each.zero_grad()
    saved = sorted(int(each.name[5:15]) for each in folder.glob("step-*"))
    return saved, [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["two stages", "frozen network"])
def test_gradients_of_an_optimizer_that_no_longer_steps_delay_no_save(kind, tmp_path):
    saved, expected = run(kind, tmp_path / "whole")
    assert saved[-5:] == [40, 50, 60, 70, 80]
    with pytest.raises(KeyboardInterrupt):
        run(kind, tmp_path / "resumed", interrupt=57)
    shutil.rmtree(max((tmp_path / "resumed").glob("step-*")))  # as after a kill
    _, weights = run(kind, tmp_path / "resumed")
    assert all(map(torch.equal, weights, expected))


def test_an_accumulation_delays_a_save_until_its_step(tmp_path):
    assert all(step % 4 == 0 for step in run("accumulates", tmp_path)[0][1:])


WARMUP = 6
"""Steps until the spike detector is warm."""


@host_and_device
def test_a_record_has_what_the_engine_ordered(where: str):
    run, driver = driven(where)
    assert driver.take_dispatch() is None

    # A healthy step.
    driver.observe(7.0)
    run.step(0)
    first = single_record(driver)
    assert driver.take_dispatch() is None
    assert (first.engine, first.step, first.loss) == ("optimizer", 1, 7.0)
    assert (first.onset, first.incident, first.incident_open) == (-1, 0, False)
    assert first.decision == (1.0, False, 1.0, Action(0), Cause(0), 0, None)
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    assert first.grad_norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item())

    # A bad step.
    driver.observe(NAN)
    run.step(1, NAN)
    bad = single_record(driver)
    assert bad.why is Why.POLICY
    assert bad.cause is Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
    assert bad.action is Action.ROLLBACK | Action.CUT_LR
    assert (bad.lr_scale, bad.rollback_depth) == (0.5, 1)
    assert (bad.step, bad.onset, bad.incident, bad.incident_open) == (2, 1, 1, True)
    assert (bad.loss, bad.grad_norm) == (7.0, first.grad_norm)

    # Two healthy steps end the incident.
    for i in (2, 3):
        run.step(i)
        record = single_record(driver)
    assert (record.onset, record.incident, record.incident_open) == (1, 1, False)


@host_and_device
def test_a_step_that_a_scaler_drops_was_not_judged(where: str):
    """Its record is unjudged: no step without an alarm, and not the step before."""
    run, driver = driven(where)
    run.step(0, NAN)
    judged = single_record(driver)
    run.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    run.step(1, NAN)
    record = single_record(driver)
    assert judged.action
    assert record.step == judged.step == 1
    assert (record.cause, record.action, record.why) == (0, 0, Why.EXTERNAL)
    assert (record.lr_scale, record.incident_open, record.evidence) == (0.5, True, ())


@pytest.mark.parametrize("between", ["a limit", "out of memory"])
def test_an_evaluation_counts_at_the_next_step_whatever_happens_in_between(between: str):
    """The Healer may limit the rate or the norm, or repeat the batch in smaller parts."""
    overfit = ("overfit", OverfitConfig(patience=1))
    run = SmallTorchRun(partial(SGD, lr=0.1))
    driver = TorchDriver(run.state, Engine(EngineConfig(detectors=(overfit,))))
    for i in range(3):
        if i == 2:
            driver.observe_eval(99.0)
            if between == "a limit":
                driver.load(None, driver.engines())
            else:
                driver.window.begin_window()
                driver.window.redo_window([], clear_cache=False)
        driver.observe(1.0)
        run.step(i)
        assert single_record(driver).cause == (Cause.OVERFIT if i == 2 else 0)


def test_the_rate_is_the_largest_of_the_groups_as_the_engine_reads():
    """Otherwise a limit of the first group's rate would stop the other groups."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    groups = [{"params": m.parameters(), "lr": r} for m, r in ((body, 1e-4), (head, 1e-2))]
    driver = TorchDriver({"a": body, "b": head, "optimizer": SGD(groups)}, "default")
    assert driver.learning_rates() == {"optimizer": 1e-2}
    driver.healings["optimizer"].optimizer.param_groups[1]["lr"] = None  # Adafactor computes it
    assert driver.learning_rates() == {"optimizer": 1e-4}


@pytest.mark.parametrize("after_backward", [False, True])
def test_a_batch_that_the_loop_leaves_out_itself_costs_no_other(after_backward: bool):
    state = model_and()
    with healcore.Healer(state=state) as healer:
        for factor in healer.batches([1.0, NAN, 1.0]):
            loss = state["model"](torch.ones(1, 2)).sum() * factor
            healer.observe(loss)
            if after_backward:
                state["optimizer"].zero_grad()
            if after_backward or loss.isfinite():
                loss.backward()
            if loss.isfinite():
                state["optimizer"].step()
    assert healer.metrics()["heal/skips"] == 0


def test_gradients_left_after_a_step_are_not_an_accumulation():
    run, driver = driven()
    assert driver.may_save()
    run.backward(0)
    assert not driver.may_save()
    run.optimizer.step()
    assert driver.may_save(), "cleared before the next backward, or not"
    run.optimizer.zero_grad(set_to_none=False)
    assert driver.may_save()
    run.backward(1)
    assert not driver.may_save()
    run.optimizer.zero_grad()
    assert driver.may_save(), "thrown away"


class Named:
    """Three layers and a parameter of their own, after steps of usual gradients."""

    def __init__(self, where: str = "host") -> None:
        layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
        self.net = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.net.register_parameter("head", nn.Parameter(torch.ones(1)))
        self.optimizer = AdamW(self.net.parameters(), fused=True)
        state = {"model": self.net, "optimizer": self.optimizer}
        self.driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})
        for i in range(WARMUP):
            assert self.step({}, 1.0 + 0.01 * (i % 2)).evidence == ()

    def step(self, norms: dict[str, float], usual: float = 1.0) -> Any:
        """The record of a step whose gradients have these norms, `usual` where none is given."""
        for name, p in self.net.named_parameters():
            p.grad = torch.zeros_like(p)
            p.grad.view(-1)[0] = norms.get(name, usual)
        self.optimizer.step()
        return single_record(self.driver)


@host_and_device
def test_nonfinite_gradients_are_named_first_and_then_what_stood_out(where: str):
    bad = {"layers.0.weight": 5.0, "layers.1.weight": NAN, "head": 50.0, "layers.2.weight": 3.0}
    record = Named(where).step(bad)
    assert record.cause & Cause.NONFINITE_GRAD
    assert [e.name for e in record.evidence] == ["layers.1.weight", "head", "layers.0.weight"]
    assert str([e.grad_norm for e in record.evidence]) == "[nan, 50.0, 5.0]"


def test_a_spike_is_compared_with_the_last_step_without_an_alarm():
    named = Named()
    for _ in range(2):  # the first bad step is not what is usual at the second
        record = named.step({"layers.2.weight": 100.0})
        assert record.cause == Cause.GRAD_SPIKE
        assert [(e.name, e.grad_norm) for e in record.evidence] == [("layers.2.weight", 100.0)]


@pytest.mark.slow
def test_parameters_of_several_modules_and_of_none_have_longer_names():
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    alone = nn.Parameter(torch.ones(1))
    optimizer = SGD([{"params": [body.weight]}, {"params": [head.weight, alone]}])
    state = {"body": torch.compile(body), "head": head, "extra": alone, "optimizer": optimizer}
    driver = TorchDriver(state, ROLLS_BACK)
    for p in (body.weight, head.weight, alone):
        p.grad = torch.full_like(p, NAN)
    optimizer.step()
    names = ["body.weight", "head.weight", "optimizer.2"]
    assert [e.name for e in single_record(driver).evidence] == names


@host_and_device
def test_added_parameters_are_judged_named_and_skipped(where: str):
    torch.manual_seed(0)
    body, head = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = AdamW(body.parameters(), lr=0.01)
    state = {"body": body, "head": head, "optimizer": optimizer}
    driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})
    for i in range(WARMUP + 2):
        if i == WARMUP:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.02})
        optimizer.zero_grad()
        head.zero_grad()
        head(body(torch.ones(4, 3))).mean().backward()
        if i > WARMUP:
            before = snapshot(optimizer)
            head.weight.grad.fill_(NAN)  # type: ignore[union-attr]
        optimizer.step()
        record = single_record(driver)
        assert bool(record.cause) == (not record.taken) == (i > WARMUP)
    assert [each.name for each in record.evidence] == ["head.weight"]
    assert_same(snapshot(optimizer), before)
