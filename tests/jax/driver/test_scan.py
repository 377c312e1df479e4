"""`Healer.scan`: a loop that is compiled as a whole runs in blocks, with the bits of one scan."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Checkpoints, Healer
from healcore.core.decision import Action
from healcore.errors import HealerError
from healcore.events.models import Ending
from healcore.jax import HealStateError, protect
from healcore.runtime import healer as healer_module
from healcore.runtime.data.readers import ScanBlocks
from healcore.runtime.run.ending.exits import RunEnd, RunStopped
from healcore.runtime.run_options import Hooks
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import SKIPS, rules
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.driver.small_runs import in_place

TX = protect(optax.adam(1e-2), SKIPS)
EVERY_4 = Checkpoints(every=4)


def loss_of(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["a"])
    return jnp.mean((hidden @ params["b"] - jnp.sin(x.sum(1, keepdims=True))) ** 2)


def start(tx: Any = TX) -> Any:
    """Parameters, the optimizer, an "environment" and a key, as the carry of PPO."""
    params = {"a": jnp.full((4, 8), 0.1, "float32"), "b": jnp.full((8, 1), 0.2, "float32")}
    return params, tx.init(params), jnp.zeros(4), jax.random.key(3)


def make_update(tx: Any = TX, bad: int = -1, inner: int = 2) -> Any:
    """An update with a rollout and `inner` optimizer steps; step `bad` has NaN."""

    def update(state: Any, number: Any) -> Any:
        params, opt_state, place, key = state
        key, draw = jax.random.split(key)
        x = place + jax.random.normal(draw, (inner, 8, 4))
        x = jnp.where(number == bad, jnp.nan, x)

        def step(carry: Any, x: Any) -> Any:
            params, opt_state = carry
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
            return (optax.apply_updates(params, updates), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(step, (params, opt_state), x)
        place = jnp.tanh(place + 0.1)
        return (params, opt_state, place, key), {"loss": losses.mean(), "number": number}

    return update


UPDATE = make_update()


def trained(state: Any) -> Any:
    params, opt_state, place, key = state
    return params, opt_state.inner_state, place, jax.random.key_data(key)


@functools.cache
def one_scan(length: int) -> Any:
    """What the program does without a Healer."""
    state, outputs = jax.jit(lambda s: jax.lax.scan(UPDATE, s, jnp.arange(length)))(start())
    return trained(state), outputs


def scanned(
    folder: Any, length: int = 22, every: int = 5, update: Any = UPDATE, **options: Any
) -> Any:
    new_process()
    state = start()
    with Healer(SKIPS, state=state, store=folder, checkpoints=EVERY_4, **options) as healer:
        state, outputs = healer.scan(update, state, length, every=every)
        assert state is healer.state
    return state, outputs, healer


@pytest.mark.slow
def test_blocks_have_the_bits_of_one_scan_and_every_step_is_judged(tmp_path):
    """The last block is shorter."""
    state, outputs, healer = scanned(tmp_path)
    expected, losses = one_scan(22)
    assert_same_bits((trained(state), outputs), (expected, losses))
    assert healer.step == 44
    steps = [each["step"] for each in events(tmp_path, "save")]
    assert steps == [0, 10, 20, 30, 40, 44, 44], "the end of the block saves what is there"
    lines = (tmp_path / "healcore.metrics.jsonl").read_text().splitlines()
    assert len(lines) == 44


def test_a_second_scan_of_an_update_compiles_nothing(tmp_path):
    traced = []
    plain = make_update()

    def update(state: Any, number: Any) -> Any:
        traced.append(number)
        return plain(state, number)

    new_process()
    with Healer(SKIPS, state=start(), store=tmp_path, checkpoints=EVERY_4) as healer:
        state, _ = healer.scan(update, healer.state, 7, every=5)
        first = len(traced)
        assert first > 0
        healer.scan(update, state, 7, every=5)
        assert len(traced) == first


class Killed(BaseException):
    """As a kill: nothing is saved."""


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 3])
def test_a_killed_run_resumes_at_a_block_with_the_bits_of_one_scan(every, tmp_path, monkeypatch):
    """Also with blocks of another size; the outputs are those of this process."""
    next_block = ScanBlocks.__next__

    def killed(blocks: ScanBlocks) -> Any:
        last = next_block(blocks)
        if blocks.first >= 15:
            raise Killed
        return last

    def without_save(run: Any, error: BaseException | None, **_: Any) -> RunEnd:
        run.claims[0].release()
        return RunEnd(Ending.EXCEPTION, error)

    with monkeypatch.context() as patch:
        patch.setattr(ScanBlocks, "__next__", killed)
        patch.setattr(healer_module, "end_run", without_save)
        with pytest.raises(Killed):
            scanned(tmp_path)
    state, outputs, healer = scanned(tmp_path, every=every)
    expected, losses = one_scan(22)
    assert_same_bits(trained(state), expected)
    first = int(outputs["number"][0])
    assert 0 < first <= 15
    assert_same_bits(outputs, jax.tree.map(lambda x: x[first:], losses))
    assert healer.step == 44


@pytest.mark.slow
def test_a_completed_run_trains_nothing_and_resume_true_goes_on(tmp_path):
    scanned(tmp_path, 10)
    state, outputs, healer = scanned(tmp_path, 10)
    assert_same_bits(trained(state), one_scan(10)[0])
    assert (healer.step, outputs["loss"].shape) == (20, (0,))
    state, outputs, healer = scanned(tmp_path, 22, resume=True)
    expected, losses = one_scan(22)
    assert_same_bits(trained(state), expected)
    assert_same_bits(outputs["loss"], losses["loss"][10:])


@pytest.mark.slow
def test_a_rollback_repeats_the_blocks_with_the_same_bits(tmp_path):
    """The environment and the keys are restored too. No update is skipped."""
    ordered = []

    def hook(incident: Any) -> Any:
        ordered.append(incident.step)
        return Action.ROLLBACK if len(ordered) == 1 else None

    update = make_update(bad=13)
    plain = jax.jit(lambda s: jax.lax.scan(update, s, jnp.arange(22)))(start())
    state, outputs, healer = scanned(tmp_path, update=update, hooks=Hooks(on_incident=hook))
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["checkpoint"] <= 20
    assert rollback["batches"] == []
    assert healer.rollbacks == 1
    assert healer.step == 44
    assert ordered[:2] == [26, 26], "update 13 has NaN again"
    assert_same_bits(outputs, plain[1])
    assert np.isfinite(outputs["loss"]).sum() == 21
    assert_same_bits(trained(state)[2:], trained(plain[0])[2:])


@pytest.mark.slow
def test_a_second_scan_continues_the_first_and_a_loop_over_epochs_goes_back(tmp_path):
    new_process()
    with Healer(SKIPS, state=start(), store=tmp_path, checkpoints=EVERY_4) as healer:
        losses = []
        for epoch in healer.epochs(2):
            state, outputs = healer.scan(UPDATE, healer.state, 11, every=5)
            losses.append(outputs["loss"])
            assert healer.epoch == epoch
    expected, outputs = one_scan(22)
    assert_same_bits(trained(state), expected)
    assert_same_bits(jnp.concatenate(losses), outputs["loss"])


@pytest.mark.slow
def test_what_the_program_still_holds_can_be_read_unless_it_is_donated():
    params, *_ = state = start()
    twice = (*state[:2], params["a"][:, 0], params["a"][:, 1])

    def update(state: Any, number: Any) -> Any:
        new, outputs = UPDATE((state[0], state[1], state[2], jax.random.key(0)), number)
        return (*new[:2], state[2] + 1, state[3]), outputs

    with Healer(SKIPS, state=twice) as healer:
        first, _ = healer.scan(update, twice, 4, every=2)
        assert np.isfinite(params["a"]).all()
        healer.scan(update, first, 4, every=2)
        assert np.isfinite(first[0]["a"]).all()
        changed = (*healer.state[:2], jnp.zeros(4), healer.state[3])
        last, _ = healer.scan(update, changed, 4, every=2, donate=True)
        assert changed[0]["a"].is_deleted()
        assert_same_bits(last[2], jnp.full(4, 4.0))
        assert healer.step == 24


@pytest.mark.slow
def test_functions_of_a_state_stay_constants_of_the_program():
    """The update changes the number `count`."""
    params, opt_state, place, key = start()
    state = {"carry": (params, opt_state, place, key), "act": jnp.tanh}
    state["count"] = 0

    def update(state: Any, number: Any) -> Any:
        carry, _ = UPDATE(state["carry"], number)
        return {**state, "carry": carry, "count": state["count"] + 1}, state["act"](number * 1.0)

    with Healer(SKIPS, state=state) as healer:
        state, outputs = healer.scan(update, state, 6, every=3)
    assert (state["act"], int(state["count"])) == (jnp.tanh, 6)
    assert outputs.shape == (6,)


@pytest.mark.slow
def test_updates_without_an_optimizer_step_are_no_steps(tmp_path):
    """As before the replay buffer of DQN is full, and where only every fourth update learns."""

    def update(state: Any, number: Any) -> Any:
        learns = (number >= 20) & (number % 4 == 0)
        return jax.lax.cond(learns, lambda s: UPDATE(s, number)[0], lambda s: s, state), learns

    _, learnt, healer = scanned(tmp_path, 60, update=update)
    assert int(learnt.sum()) == 10
    assert healer.metrics()["heal/skips"] == 0
    assert events(tmp_path, "end")[-1]["ending"] == "completed"
    assert not events(tmp_path, "problem")


@pytest.mark.slow
def test_more_steps_in_one_update_than_records_are_refused_with_the_remedy():
    update = make_update(inner=65)
    message = r"one dispatch has 65 steps.*records=65"
    with pytest.raises(HealStateError, match=message), Healer(SKIPS, state=start()) as healer:
        healer.scan(update, healer.state, 2, every=1)


@pytest.mark.slow
def test_a_loss_fn_gets_the_number_of_a_blocks_last_update():
    seen = []

    def loss_fn(state: Any, number: Any) -> Any:
        seen.append(int(number))
        return loss_of(state[0], jax.random.normal(jax.random.key(number), (8, 4)))

    with Healer("default", state=start(PROTECTED), loss_fn=loss_fn) as healer:
        healer.scan(make_update(PROTECTED), healer.state, 60, every=5)
    assert seen
    assert {number % 5 for number in seen} == {4}


PROTECTED = protect(optax.adam(1e-2))


def test_wrong_arguments_say_what_to_write():
    state = start()
    with Healer(SKIPS, state=state) as healer:
        for wrong in ({"steps": 0, "every": 1}, {"steps": 5, "every": 2.5}):
            with pytest.raises(ValueError, match="a whole number >= 1"):
                healer.scan(UPDATE, healer.state, **wrong)
        with pytest.raises(ValueError, match="a whole number >= 1, not Array"):
            healer.scan(UPDATE, healer.state, jnp.zeros((300, 4)), every=5)
        for result in (
            lambda state: state,
            lambda state: state[:2],
            lambda state: (state[0], state[1:]),
            lambda state: None,
        ):
            with pytest.raises(HealStateError, match="return state, outputs"):
                healer.scan(lambda state, number, result=result: result(state), state, 5, every=5)
        with pytest.raises(HealStateError, match=r"expected (no leaf|int32)"):
            healer.scan(UPDATE, state[1:], 5, every=5)
        healer.scan(UPDATE, healer.state, np.int64(1), every=np.int32(1))
    objects = in_place("default")
    with pytest.raises(HealerError, match="split"), Healer(state=objects.state) as healer:
        healer.scan(UPDATE, None, 5, every=5)


@pytest.mark.slow
def test_a_policy_that_rolls_back_at_each_nan_stops_because_no_update_is_skipped(tmp_path):
    policy = rules()
    tx = protect(optax.adam(1e-2), policy)
    update = make_update(tx, bad=3)
    with (
        pytest.raises(RunStopped, match="the budget of recoveries is exhausted"),
        Healer(policy, state=start(tx), store=tmp_path, checkpoints=EVERY_4) as healer,
    ):
        healer.scan(update, healer.state, 12, every=3)


@pytest.mark.parametrize(
    ("reads_number", "warnings"),
    [pytest.param(False, 1, id="its own batch"), pytest.param(True, 0, id="a batch of the number")],
)
def test_a_loss_fn_without_the_batch_of_its_update_is_reported(
    tmp_path: Any, reads_number: bool, warnings: int
):
    """Both batches of a comparison are equal then, so no comparison counts."""

    def update(state: Any, number: Any) -> Any:
        params, opt_state, key = state
        key, draw = jax.random.split(key)
        x = jax.random.normal(draw, (8, 4))
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = PROTECTED.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        params = jax.tree.map(lambda p: jnp.where(number == 200, 8 * p, p), params)
        return (params, opt_state, key), loss

    def loss_fn(state: Any, number: Any) -> Any:
        key = jax.random.key(1)
        if reads_number:
            key = jax.random.fold_in(key, number)
        return loss_of(state[0], jax.random.normal(key, (8, 4)))

    params, opt_state, _, key = start(PROTECTED)
    state = params, opt_state, key
    options: Any = {"loss_fn": loss_fn, "checkpoints": Checkpoints(every=100)}
    with Healer("default", state=state, store=tmp_path, **options) as healer:
        healer.scan(update, state, 400, every=10)
    problems = [each for each in events(tmp_path, "problem") if "same loss" in str(each)]
    assert len(problems) == warnings
