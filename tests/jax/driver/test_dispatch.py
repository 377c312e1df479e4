"""The records of a dispatch on the host, of one step or of many, whose state was donated."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer
from healcore.core.decision import Action, Cause
from healcore.core.step_record import SKIPS
from healcore.jax import HealStateError, heal, metrics, protect
from healcore.jax.driver.driver import JaxDriver
from tests.healer.run_options import grouped
from tests.jax import policies
from tests.jax.driver.small_runs import POLICY, RUNS, advance, batch, driven, every_third, plain
from tests.open_run import run_of


def read(handles: list[Any]) -> list[Any]:
    return [record for handle in handles for record in handle.read()[-1]]


def neutral(record: Any) -> bool:
    found = (
        record.cause,
        record.action,
        record.why in SKIPS,
        record.grad_scale,
        record.rollback_depth,
    )
    return (*found, record.evidence) == (0, 0, False, 1.0, 0, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "tensor"),
    [
        ("plain", "opt_state", "['params']['hidden']"),
        ("linen", "opt_state", ".params['BatchNorm_0']['bias']"),
        ("nnx", "optimizer", "['model']['first']['bias']"),
    ],
)
def test_steps_are_reported_in_order_though_each_was_donated_to_the_next(kind, engine, tensor):
    run, driver = driven(RUNS[kind]())
    assert driver.take_dispatch() is None
    handles = advance(driver, run, [batch(0), batch(1), batch(2, bad=True), batch(3)])
    assert driver.take_dispatch() is None  # no step since
    first, second, bad, after = read(handles)
    assert [each.step for each in (first, second, bad, after)] == [1, 2, 3, 4]

    # A healthy step.
    assert first.engine == engine
    assert neutral(first)
    assert (first.onset, first.incident, first.incident_open) == (-1, 0, False)

    # The bad step, and the tensor that it names.
    assert bad.cause == Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
    assert bad.action == Action.ROLLBACK | Action.CUT_LR
    assert (not bad.taken, bad.rollback_depth, bad.lr_scale) == (True, 1, 0.25)
    assert (bad.onset, bad.incident, bad.incident_open) == (2, 1, True)
    assert (bad.loss, bad.grad_norm) == (second.loss, second.grad_norm)  # the last finite ones
    assert bad.evidence[0].name == tensor
    assert all(np.isnan(each.grad_norm) for each in bad.evidence)

    # The step after it is healthy, within the same incident.
    assert (after.cause, after.onset, after.incident) == (0, 2, 1)


@pytest.mark.slow
def test_the_values_are_those_on_the_device_and_have_python_types():
    run, driver = driven(plain(policy=policies.BOTH), policies.BOTH)
    *_, last = advance(driver, run, [batch(i) for i in range(30)])
    (record,) = last.read()[-1]
    seen = metrics(driver.live["opt_state"])
    for name in ("loss", "grad_norm", "threshold", "z", "z_loss"):
        value = getattr(record, name)
        assert type(value) is float
        assert np.float32(value) == np.asarray(seen[f"heal/{name}"])
    assert record.threshold > 0
    assert record.grad_scale == float(seen["heal/grad_scale"])
    assert record.step == 30
    kinds = (float, bool, float, Action, Cause, int, type(None))
    assert tuple(map(type, record.decision)) == kinds


@pytest.mark.slow
def test_averages_of_the_parameters_are_not_taken_for_them():
    """An average has the shapes of the parameters; an alert would name its tensors."""
    run, driver = driven(plain(ema={"hidden": jnp.zeros((4, 3)), "out": {"w": jnp.zeros((3, 1))}}))
    (handle,) = advance(driver, run, [batch(0, bad=True)])
    names = [each.name for each in handle.read()[-1][0].evidence]
    assert names == ["['params']['hidden']", "['params']['out']['w']"]


def test_a_spike_is_compared_with_the_last_step_without_an_alarm():
    """The same rule as in torch, see `healcore.core.step_record`; one bad tensor is named alone."""
    params = {name: jnp.ones(1) for name in "abc"}
    tx = optax.chain(heal(policies.SKIP), optax.sgd(0.0))
    driver = JaxDriver((params, tx.init(params)), policies.SKIP)
    update = jax.jit(tx.update)

    def names(a: float, b: float = 3.0, c: float = 1.0) -> Any:
        grads = {"a": jnp.full(1, a), "b": jnp.full(1, b), "c": jnp.full(1, c)}
        _, opt_state = update(grads, driver.live[1], params, value=jnp.float32(1.0))
        driver.update((params, opt_state))
        return [each.name for each in read([driver.take_dispatch()])[0].evidence]

    for i in range(100):
        assert names(1.0 + 0.01 * (i % 3)) == []
    for _ in range(2):  # the first bad step is not what is usual at the second
        assert names(50.0, c=500.0) == ["[0]['c']", "[0]['a']"]
    assert names(1.0, b=np.inf) == ["[0]['b']"]


@pytest.mark.slow
def test_an_order_is_reported_once_and_not_at_every_micro_step_after_it():
    run, driver = driven(plain(wrap=every_third))
    records = read(advance(driver, run, [batch(i, bad=i == 1) for i in range(5)]))
    found = [(each.step, each.incident, each.lr_scale) for each in records]
    assert found == 2 * [(0, 0, 1.0)] + 3 * [(1, 1, 0.25)]
    assert records[2].action == Action.ROLLBACK | Action.CUT_LR
    assert records[2].evidence
    assert all(map(neutral, records[:2] + records[3:]))
    assert {each.onset for each in records[3:]} == {0}


@pytest.mark.parametrize("replaced", [True, False])
def test_a_healing_state_that_was_put_back_orders_nothing_itself(replaced):
    """`Engine.on_rollback` keeps the last decision, which is the order that it answers."""
    run, driver = driven(plain(wrap=every_third))
    store = driver.store(None)
    store.save(0, driver.state())
    advance(driver, run, [batch(i, bad=i == 1) for i in range(3)])
    if replaced:
        driver.load(store.restore(0, driver.state()).state)
    driver.load(None, driver.engines())
    assert driver.take_dispatch() is None
    records = read(advance(driver, run, [batch(i) for i in range(3)]))
    assert [each.step for each in records] == [1, 1, 2]
    assert neutral(records[0])
    assert neutral(records[1])
    assert records[2].taken is replaced  # the accumulator still has the NaN


def test_each_engine_is_reported_at_its_own_cadence():
    tx = protect(optax.sgd(0.1), POLICY)
    params = {"w": jnp.ones(3)}
    driver = JaxDriver({"slow": tx.init(params), "fast": tx.init(params)}, POLICY)
    good, bad = {"w": jnp.full(3, 0.5)}, {"w": jnp.full(3, jnp.nan)}
    # The slow one sees a NaN in step 1, and is inactive in steps 0, 2 and 3.
    of_slow = {1: bad, 4: good}
    slow, fast = [], []
    for step in range(5):
        state = dict(driver.live)
        _, state["fast"] = tx.update(good, state["fast"], params)
        if step in of_slow:
            _, state["slow"] = tx.update(of_slow[step], state["slow"], params)
        driver.update(state)
        records = {record.engine: record for record in driver.take_dispatch().read()[-1]}
        slow.append(records["slow"])
        fast.append(records["fast"])

    assert [record.step for record in slow] == [0, 1, 1, 1, 2]
    assert [record.step for record in fast] == [1, 2, 3, 4, 5]
    assert [record.cause for record in slow] == [0, Cause.NONFINITE_GRAD, 0, 0, 0]
    assert all(neutral(record) for record in (slow[0], *slow[2:], *fast))


def start_many(records=32):
    """The state that holds this number of records, and a dispatch of many steps."""
    run = plain(optax.sgd(0.01), wrap=functools.partial(protect, records=records))

    def one(state, x):
        return run.step(state, x), None

    def many(state, xs):
        return jax.lax.scan(one, state, xs)[0]

    return run.state, jax.jit(many, donate_argnums=0)


def stacked_batches(steps, bad=()):
    return np.stack([batch(i, bad=i in bad) for i in range(steps)])


def run_dispatches(xs, k, tmp_path, **options):
    """The Healer and its lines of metrics, of a run with `k` steps in each dispatch."""
    state, many = start_many()
    metrics = tmp_path / f"{k}.metrics.jsonl"
    dispatches = [xs[i : i + k] for i in range(0, len(xs), k)]
    with Healer(POLICY, state=state, **grouped(options, metrics=metrics)) as healer:
        for dispatch in healer.batches(dispatches):
            healer.update(many(healer.state, dispatch))
    return healer, [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.slow
def test_steps_have_the_same_line_each_however_many_are_in_a_dispatch(tmp_path):
    logs = []
    for k in (1, 7):
        # 52 is no multiple of 7: the last dispatch is shorter.
        healer, lines = run_dispatches(stacked_batches(52), k, tmp_path, save_every=20)
        assert healer.step == 52
        kept = [saved.step for saved in run_of(healer).store.checkpoints()]
        assert kept[0] == 0
        assert all(step % k == 0 for step in kept[:-1])
        logs.append([{key: v for key, v in e.items() if key not in ("time", "run")} for e in lines])
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(52))
    assert len({line["loss"] for line in logs[0]}) == 52


@pytest.mark.slow
def test_an_order_within_a_dispatch_is_carried_out(tmp_path):
    healer, lines = run_dispatches(stacked_batches(60, bad=[43]), 10, tmp_path, save_every=10)
    assert healer.rollbacks == 1
    assert next(line["step"] for line in lines if "NONFINITE_GRAD" in line["cause"]) == 43


def test_a_dispatch_of_more_steps_than_the_state_has_records_is_refused():
    state, many = start_many(records=4)
    driver = JaxDriver(state, POLICY)
    driver.update(many(state, stacked_batches(20, bad=[3])))
    with pytest.raises(HealStateError, match="records=20"):
        driver.take_dispatch().read()
