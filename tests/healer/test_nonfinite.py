"""NaN and Inf that no skip heals: in the state, or in every step since the start."""

import logging
import math
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore import Checkpoints
from healcore import policy as policies
from healcore.jax import protect
from healcore.runtime.healer import Healer
from healcore.runtime.reporting.nonfinite_steps import FROM_START
from healcore.runtime.run.ending.exits import RunStopped
from healcore.torch import attach
from tests.healer.run_directory import events, new_process, postmortems
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    EVERY_5,
    Faults,
    TorchLoop,
    TrainingResult,
    breaks_off,
    loop_of,
    rules,
    train,
)


def with_statistics(framework: str = "torch", policy: Any = None) -> Any:
    """A loop with an array `seen` on which no loss depends."""
    loop = loop_of(framework, policy=policy)
    if isinstance(loop, TorchLoop):
        loop.model.register_buffer("seen", torch.zeros(3))
    else:
        loop.state["seen"] = jnp.zeros(3)
    return loop


def spoil(loop: Any, healer: Any) -> None:
    """Makes the statistics Inf."""
    if loop.framework == "torch":
        loop.model.seen.fill_(np.inf)
    else:
        healer.state["seen"] = jnp.full(3, np.inf)


def spoilt_run(
    loop: Any, policy: Any, store: Any, at: Any, *, once: bool = False, **options: Any
) -> TrainingResult:
    """A run whose statistics become Inf before some batches. NaN is restored after the step."""
    spoilt = []

    def before(healer: Any, number: int) -> None:
        if number not in at or (once and number in spoilt):
            return
        spoilt.append(number)
        spoil(loop, healer)

    return train(loop, policy, range(60), store=store, before=before, **options)


@BOTH_FRAMEWORKS
def test_the_run_goes_back_by_default(framework, tmp_path):
    loop = with_statistics(framework, rules())
    result = spoilt_run(loop, rules(), tmp_path, at=[22], once=True)
    (logged,) = events(tmp_path, "rollback")
    assert logged["onset"] == 24, "the checkpoint of step 25 has it"
    assert logged["checkpoint"] in (15, 20)
    assert result.step == 60, "no batch is skipped"
    assert "seen" in logged["why"]
    assert result.last_good is not None
    assert result.last_good > 30
    (after,) = postmortems(tmp_path)
    assert "NaN or Inf in" in " ".join(after["diagnosis"].split())
    assert "step 25" in after["diagnosis"]


def finite_statistics(loop: Any) -> bool:
    """Whether the array `seen` is finite at the end of a run."""
    seen = loop.model.seen.numpy() if loop.framework == "torch" else np.asarray(loop.state["seen"])
    return bool(np.isfinite(seen).all())


@BOTH_FRAMEWORKS
def test_an_array_that_every_batch_spoils_costs_one_batch(framework, tmp_path):
    """It is infinite after the next batch too, so the program writes it. Then it is allowed."""
    policy = policies.load("default", rollback={"probation": 5})
    loop = with_statistics(framework, policy)
    loop.faults = Faults(always={41, 48})  # their alarms have another reason
    result = spoilt_run(loop, policy, tmp_path, range(22, 100))
    assert (result.rollbacks, result.step) == (2, 59)
    problems = [each["problem"] for each in events(tmp_path, "problem")]
    (line,) = [each for each in problems if "again after a rollback" in each]
    assert "are allowed in them from now on" in line
    assert result.last_good is not None
    assert result.last_good > 30


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("bad", [20, 22, 24])
def test_only_the_batch_is_skipped_that_spoils_an_array_again(bad, framework, tmp_path):
    """An outlier leaves Inf in running statistics, and loss and gradients stay finite."""
    policy = policies.load("default", rollback={"probation": 5, "skip_batches": 3})
    loop = with_statistics(framework, policy)
    result = spoilt_run(loop, policy, tmp_path, [bad])
    assert finite_statistics(loop)
    first, second = events(tmp_path, "rollback")
    assert not first.get("batches")
    assert second["batches"] == [[0, bad]]
    assert (second["onset"], second["step"]) == (bad, bad + 1)
    assert second["checkpoint"] == 20, "no older one: its steps were repeated and checked"
    assert (result.step, loop.faults.order.count(bad)) == (59, 2)
    assert "seen" in second["why"]
    assert not any("again after" in each["problem"] for each in events(tmp_path, "problem"))


@BOTH_FRAMEWORKS
def test_a_kill_between_the_two_rollbacks_changes_nothing(framework, tmp_path):
    policy = policies.load("default", rollback={"probation": 5})
    killed = with_statistics(framework, policy)
    visits = []

    def before(healer: Any, number: int) -> None:
        visits.append(number)
        if visits.count(23) == 2:  # never: the second rollback is at the step before
            raise AssertionError
        if visits.count(21) == 2:
            raise RuntimeError("power")
        if number == 22:
            spoil(killed, healer)

    with pytest.raises(RuntimeError, match="power"):
        train(killed, policy, range(60), store=tmp_path, before=before)
    new_process()
    loop = with_statistics(framework, policy)
    result = spoilt_run(loop, policy, tmp_path, [22])
    assert (result.step, finite_statistics(loop)) == (59, True)
    assert [each.get("batches", []) for each in events(tmp_path, "rollback")] == [[], [[0, 22]]]


def test_the_batch_is_left_out_within_a_budget_of_one_rollback(tmp_path):
    """The second rollback belongs to the same try: it knows the very batch."""
    policy = policies.load("default", rollback={"probation": 5}, budget={"recoveries": 1})
    loop = with_statistics("torch", policy)
    result = spoilt_run(loop, policy, tmp_path, [22])
    assert (result.rollbacks, result.step) == (2, 59)
    assert finite_statistics(loop)


def test_an_array_that_no_loss_reads_neither_cuts_the_rate_nor_stops_the_run(tmp_path):
    """Bad batches leave Inf in it, which torch restores at a skip. Only these are skipped."""
    policy = policies.load("default", rollback={"probation": 5})
    bad = {12, 22, 32, 42, 52}
    loop = with_statistics("jax", policy)
    loop.faults = Faults(always=bad)
    result = spoilt_run(loop, policy, tmp_path, bad)
    rollbacks = events(tmp_path, "rollback")
    assert len(rollbacks) == result.rollbacks <= 2 * policy.budget.recoveries
    skipped = {number for each in rollbacks for _, number in each["batches"]}
    assert skipped <= bad
    assert result.step == 60 - len(skipped)
    assert {each.get("lr_scale", 1.0) for each in rollbacks} == {1.0}
    assert not any(each.get("lr_limit") for each in rollbacks)


@pytest.mark.parametrize("bad", [[33], range(33, 80)], ids=["one batch", "every batch"])
def test_an_outlier_in_one_batch_does_not_break_the_evaluation(bad, tmp_path):
    """Its square overflows in the running variance, while loss and gradients stay finite."""
    tx = protect(optax.sgd(0.01))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            normed = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
            return jnp.mean((normed @ params["w"] + params["b"] - 1) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, memory = tx.update(grads, state["memory"], state["params"], value=loss)
        params = optax.apply_updates(state["params"], updates)
        variance = 0.9 * state["variance"] + 0.1 * x.var(0)
        return {"params": params, "memory": memory, "variance": variance}

    rows = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
    params = {"w": jnp.zeros((2, 1)), "b": jnp.zeros(1)}
    state = {"params": params, "memory": tx.init(params), "variance": jnp.ones(2)}
    with Healer(state=state, store=tmp_path, checkpoints=EVERY_5) as healer:
        for number in healer.batches(range(80)):
            first = 8 * number % len(rows)
            x = rows[first : first + 8].copy()
            if number in bad:
                x[0, 0] = 1e25
            healer.update(step(healer.state, x))
    assert not events(tmp_path, "alarm")
    assert (healer.step, healer.rollbacks) == (79, 2)
    assert [each.get("batches", []) for each in events(tmp_path, "rollback")] == [[], [[0, 33]]]
    assert np.isfinite(healer.state["variance"]).all() == (bad == [33])


def test_an_array_that_no_loss_reads_is_no_evidence_for_a_rule(tmp_path):
    """No rollback is left for the array, so it stays Inf when a rule asks for a rollback."""
    policy = policies.load("default", rollback={"probation": 5}, budget={"recoveries": 1})
    bad = {12, 22, 32, 38}
    loop = with_statistics("jax", policy)
    loop.faults = Faults(always=bad | {*range(46, 57)})
    result = spoilt_run(loop, policy, tmp_path, bad)
    assert not finite_statistics(loop)
    assert result.rollbacks <= 2, "none by the rule"


@pytest.mark.parametrize(
    ("batch", "what", "value", "preset", "steps"),
    [
        pytest.param(49, "weights", np.nan, "default", 100, id="weights, a save sees it"),
        pytest.param(49, "statistics", np.inf, "test", 100, id="statistics, a save sees it"),
        pytest.param(57, "weights", np.inf, "test", 100, id="weights, no save sees it"),
        pytest.param(57, "statistics", np.inf, "default", 100, id="statistics, no save sees it"),
        pytest.param(
            52, "weights", np.nan, "default", 60, id="too few skips for an order, and no save"
        ),
    ],
)
def test_a_rollback_skips_the_batch_after_which_the_state_was_not_finite(
    batch, what, value, preset, steps, tmp_path
):
    """The damage may not come back, so the first repeat reads the batch; the second does not."""
    policy = rules() if preset == "test" else policies.load("default", rollback={"probation": 5})
    loop = with_statistics()
    step, seen = loop.step, loop.model.seen

    def spoiling_step(healer: Any, number: int) -> None:
        """The loss is NaN while the statistics are."""
        loop.faults.always = frozenset() if seen.isfinite().all() else {number}
        step(healer, number)
        if number == batch:
            (loop.first.weight.data if what == "weights" else seen).fill_(value)

    loop.step = spoiling_step
    result = train(loop, policy, range(steps), store=tmp_path, save_every=25)
    first, second = events(tmp_path, "rollback")
    assert first["onset"] == (batch if steps == 100 else steps - 1)
    assert first["checkpoint"] == (25 if batch == 49 else 50), "the newest without it"
    assert (first["batches"], second["batches"]) == ([], [[0, batch]])
    assert result.step == steps - 1


@pytest.mark.parametrize("recoveries", [1, 3])
def test_damage_again_right_after_a_rollback_is_rolled_back_in_the_budget(recoveries, tmp_path):
    changed = {"rollback": {"probation": 5}, "budget": {"recoveries": recoveries}}
    policy = policies.load("default", **changed)
    loop = loop_of("torch")

    def before(healer: Any, number: int) -> None:
        if number in (30, 45):
            loop.first.weight.data.fill_(np.nan)

    spent = pytest.raises(RunStopped, match="1 rollback has been made within")
    with nullcontext() if recoveries > 1 else spent:
        train(loop, policy, range(80), before=before, store=tmp_path, save_every=25)
        rollbacks = [each["step"] for each in events(tmp_path, "rollback")]
        assert rollbacks == [41, 31, 55, 45], "each comes back once, then its batch is left out"


def test_weights_that_are_not_finite_after_the_last_step_are_no_completed_run(tmp_path):
    def run(average: float) -> int:
        loop = loop_of("torch")
        with Healer(state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            for number in healer.steps(12):
                loop.step(healer, number)
            loop.last.bias.data.mul_(average)
        return len(loop.faults.order)

    with pytest.raises(RunStopped, match=r"model\.3\.bias became NaN or Inf at the end"):
        run(math.nan)
    new_process()
    assert run(1.0) == 2


def test_it_stops_or_only_alerts_if_the_policy_orders_it(tmp_path):
    stops = policies.load(rules(), rollback={"nonfinite_state": "stop"})
    with pytest.raises(RunStopped, match="NaN or Inf in"):
        spoilt_run(with_statistics(), stops, tmp_path / "stop", at=[22])
    alerts = policies.load(rules(), rollback={"nonfinite_state": "alert"})
    result = spoilt_run(with_statistics(), alerts, tmp_path, at=[22], save_every=10)
    assert (result.rollbacks, result.step) == (0, 60)
    assert all(each["step"] < 25 for each in events(tmp_path, "good")), "nor is it known-good"
    assert "checkpoint 60 is not finite in model.seen" in postmortems(tmp_path)[0]["diagnosis"]


def test_a_mask_of_minus_infinity_is_allowed_after_a_restart_too(tmp_path):
    def loop():
        made = loop_of("torch")
        made.model.register_buffer("mask", torch.full((3,), -torch.inf))
        return made

    breaks_off(loop(), rules(), range(40), store=tmp_path, at=27)
    assert "model.mask" in events(tmp_path, "problem")[0]["problem"]
    assert events(tmp_path, "good")
    assert train(loop(), rules(), range(40), store=tmp_path).last_good
    assert events(tmp_path, "resume")[0]["checkpoint"] == 25


SENTENCES = {
    "loss": "the loss is NaN or Inf since the start; the first tensor is the gradient of 0.weight",
    "gradient": "the gradient is NaN or Inf since the start; the first tensor is the gradient of ",
    "weights": "the loaded weights are NaN or Inf; the first tensor is 3.bias",
}


@pytest.mark.parametrize(
    ("kind", "compares", "steps"),
    [("loss", False, 20), ("loss", True, 300), ("gradient", True, 20), ("weights", False, 300)],
)
def test_without_a_finite_step_the_healer_ends(kind, compares, steps, tmp_path):
    loop = loop_of("torch", Faults(always=range(steps) if kind == "loss" else ()))
    if kind == "weights":
        loop.last.bias.data.fill_(math.nan)
    if kind == "gradient":
        loop.first.weight.register_hook(lambda gradient: gradient * math.inf)
    factor = math.nan if kind == "loss" else 1.0
    loss_fn = (lambda batch: loop.model(torch.ones(1, 4)).mean() * factor) if compares else None
    with pytest.raises(RunStopped) as stop:
        train(loop, "default", range(steps), store=tmp_path, loss_fn=loss_fn)
    assert SENTENCES[kind] in stop.value.why
    assert len(loop.faults.order) <= FROM_START + 1


def test_nan_up_to_the_end_of_the_data_says_where_to_look(tmp_path):
    loop = loop_of("torch", Faults(always=range(30, 80)))
    with pytest.raises(RunStopped) as stop:
        train(loop, "default", range(80), store=tmp_path)
    assert stop.value.why == (
        "the data have ended, and the run has not trained on most of them: of 80 steps, 50 were "
        "skipped"
    )


def test_observing_never_ends_a_run(tmp_path):
    policy = policies.load("default", mode="observe")
    steps = FROM_START + 20
    train(loop_of("torch", Faults(always=range(steps))), policy, range(steps), store=tmp_path)
    assert events(tmp_path, "end")[0]["ending"] == "completed"


@pytest.mark.slow
def test_an_attached_policy_logs_an_error_at_powers_of_ten(caplog):
    caplog.set_level(logging.ERROR, logger="healcore")
    loop = loop_of("torch", Faults(always=range(1100)))
    healing = attach(loop.optimizer, "default")
    for number in range(1100):
        loop.step(healing, number)
    assert ["the loss is" in each.getMessage() for each in caplog.records] == [True, True]


@pytest.mark.parametrize("policy", ["zclip", "autoclip", "adagc"])
def test_a_policy_without_rollbacks_finds_weights_that_are_not_finite(policy, tmp_path):
    """Without waiting for a save that shows them."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer}
    damaged = False
    with Healer(policy, state=state, store=tmp_path) as healer:
        for step in healer.steps(60):
            loss = model(torch.ones(4, 2)).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 25 and not damaged:
                damaged = True
                model.weight.data.fill_(math.nan)
        assert healer.rollbacks == 1
    (logged,) = events(tmp_path, "rollback")
    assert logged["step"] - 25 < 20
    assert model.weight.isfinite().all()


def test_a_stop_for_weights_that_are_not_finite_says_so(tmp_path):
    """No hook is involved: the policy has no rule, and stops a run for such a state."""
    policy, loop = policies.load("zclip", rollback={"nonfinite_state": "stop"}), loop_of("torch")

    def before(healer: Any, number: int) -> None:
        if number == 20:
            loop.first.weight.data.fill_(math.nan)

    with pytest.raises(RunStopped) as stop:
        train(loop, policy, range(40), store=tmp_path, save_every=100, before=before)
    assert stop.value.why == "the weights have NaN or Inf"


@pytest.mark.slow
def test_the_last_rollback_limits_the_rate_to_one_of_the_run(tmp_path):
    """L-BFGS at 1,000 times its rate, without a `loss_fn`: a factor of 1/4 is not enough."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    inputs = [torch.randn(32, 4) for _ in range(90)]

    def train_step(batch):
        def closure():
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    with Healer(state={"model": model, "optimizer": optimizer}, store=tmp_path) as healer:
        for batch in healer.batches(inputs):
            optimizer.param_groups[0]["lr"] = 1.0 if healer.step < 20 else 1000.0
            train_step(batch)
        assert healer.rollbacks <= 6, "three, and each may find the batch after which NaN is there"
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("read_from", [165, 400], ids=["rows are read", "rows are never read"])
def test_an_optimizer_that_makes_nan_in_a_few_rows_is_held_in_its_healthy_numbers(
    read_from, tmp_path
):
    """Adam with eps 0 computes 0/0 in the rows of an embedding that have had no gradient yet."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    targets = torch.randn(50)

    def loss_fn(number: Any) -> torch.Tensor:
        words = 50 if int(number) >= read_from else 40
        random = torch.Generator().manual_seed(int(number))
        ids = torch.randint(0, words, (16,), generator=random)
        return (model(ids)[:, 0] - targets[ids]).square().mean()

    state = {"model": model, "optimizer": optimizer}
    saves = Checkpoints(every=10)
    with Healer(
        "default", state=state, store=tmp_path, checkpoints=saves, loss_fn=loss_fn
    ) as healer:
        for number in healer.batches(range(200)):
            optimizer.param_groups[0]["eps"] = 0.0 if 150 <= healer.step < 170 else 1e-8
            healer.loss(number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(each.isfinite().all() for each in model.parameters())
    assert "eps" in str([each.get("held") for each in events(tmp_path, "rollback")])
