"""The clip of the update: against the reference, in all backends, and through its faults."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import strategies as st

from healcore.core.clipping import UpdateClipConfig
from healcore.core.engine import Engine, EngineConfig, RuleConfig
from healcore.core.signals import Signals
from healcore.core.verdict import Cause
from healcore.jax import namespace as jax_namespace
from healcore.torch import namespace as torch_namespace
from tests.core import fuzz
from tests.core.engine_runner import Runner, watching
from tests.core.random_policies import BOUNDED
from tests.core.reference import clips
from tests.core.reference.ties import Ties

SHORT = UpdateClipConfig(warmup_steps=8, ema_decay=0.9)
CONFIG = EngineConfig(update_clip=SHORT)


def feed(norms: Any, config: EngineConfig = CONFIG, **signals: Any) -> tuple[list[float], Any]:
    """The factors on updates of these norms, and the engine's last state."""
    runner, found = Runner(config), []
    for i, norm in enumerate(norms):
        given = {name: values[i] for name, values in signals.items()}
        decision = runner.step(**{"grad_norm": 1.0, **given})
        runner.state, scale = runner.engine.clip_update(
            runner.state, np.float32(norm), np.bool_(decision.skip), xp=np
        )
        found.append(float(scale))
    return found, runner.state


def steady(steps: int, level: float = 1.0, seed: int = 0) -> list[float]:
    return (level * np.exp(0.05 * np.random.default_rng(seed).normal(size=steps))).tolist()


def test_an_update_that_stands_out_is_brought_to_mean_plus_k_sigma():
    norms = steady(60)
    scales, state = feed([*norms, 5.0])
    assert min(scales[:-1]) > 0.9
    assert scales[-1] * 5.0 < 1.5
    assert int(state.update_clip.clips) >= 1
    assert float(state.update_clip.norm) == 5.0


def test_one_nan_or_inf_changes_nothing():
    norms = steady(40)
    _, state = feed(norms)
    for bad in (np.nan, np.inf, -1.0, 0.0):
        scales, after = feed([*norms, bad])
        assert scales[-1] == 1.0
        np.testing.assert_equal(tuple(after.update_clip.rule), tuple(state.update_clip.rule))


def test_a_clipped_value_enters_as_clipped():
    norms = steady(40)
    first = feed([*norms, 1000.0, 3.0])[0]
    assert first[-1] < 0.6, "the one of x1000 did not raise the limit"


def test_a_true_shift_of_the_level_becomes_the_baseline():
    for rise in (1.5, 2.0, 3.0, 30.0):
        scales, _ = feed(steady(40) + steady(120, rise, seed=1))
        assert min(scales[-60:]) > 0.85, rise


def test_constant_norms_and_a_ramp_are_not_clipped():
    assert set(feed([0.5] * 100)[0]) == {1.0}
    warm_up = [step / 200 for step in range(1, 201)]  # a learning rate that warms up
    config = EngineConfig(update_clip=UpdateClipConfig())
    assert set(feed(warm_up, config)[0]) == {1.0}


def test_an_expected_change_begins_a_new_warm_up():
    norms = steady(40) + [50.0] * 8 + [5000.0]
    change = [False] * 40 + [True] + [False] * 8
    assert feed(norms)[0][40] < 0.1
    scales, _ = feed(norms, change_expected=change)
    assert scales[40:48] == [1.0] * 8
    assert scales[48] < 0.1


def test_skipped_steps_are_not_learnt():
    rule = RuleConfig(int(Cause.GRAD_SPIKE), skip=True)
    config = watching("grad_spike", rule)._replace(update_clip=SHORT)
    norms, grads = steady(41), [1.0, 1.1, 0.9, 1.05] * 10
    _, before = feed(norms[:40], config, grad_norm=grads)
    scales, after = feed([*norms[:40], 2.0], config, grad_norm=[*grads, 1e3])
    assert scales[-1] == 1.0
    np.testing.assert_equal(tuple(after.update_clip.rule), tuple(before.update_clip.rule))


def test_observe_mode_judges_and_changes_nothing():
    scales, state = feed([*steady(60), 5.0], CONFIG._replace(mode="observe"))
    assert set(scales) == {1.0}
    assert float(state.update_clip.scale) < 0.5


def test_off_there_is_no_state():
    off, on = Engine(EngineConfig()), Engine(CONFIG)
    assert off.init().update_clip is None
    saved = off.to_dict(off.init())
    assert saved["state"]["update_clip"] is None
    assert off.from_dict(saved) == off.init()
    state = feed(steady(20))[1]
    np.testing.assert_equal(on.from_dict(on.to_dict(state)), state)
    assert set(on.metrics(state)) - set(off.metrics(off.init())) == {
        "heal/update_norm",
        "heal/update_scale",
        "heal/update_clips",
    }


def test_a_rollback_restores_the_baseline_and_keeps_the_count():
    engine, then, now = Engine(CONFIG), feed(steady(20))[1], feed([*steady(40), 9.0])[1]
    after = engine.on_rollback(now, then, xp=np)
    assert after.update_clip.rule == then.update_clip.rule
    assert after.update_clip.clips == now.update_clip.clips == 1


# -- against plain Python, and in every backend ----------------------------------------------------


def test_the_core_agrees_with_the_reference():
    trace = fuzz.signals(np.random.default_rng(7), 150, 12, wild=True)
    assert trace.update_norm is not None
    compared = wrong = 0
    for lane in range(12):
        norms = trace.update_norm[:, lane]
        restarts = np.asarray(trace.change_expected)[:, lane]
        ties = Ties()
        settings = SHORT._asdict() | {"target": "max", "max_norm": None}
        theirs = clips.RULES["zclip"](_Settings(settings), ties)
        ours, _ = feed(norms, change_expected=restarts)
        for norm, restart, scale in zip(norms.tolist(), restarts.tolist(), ours, strict=True):
            ties.forget()
            fine = np.isfinite(norm) and -1e-12 < norm <= 1e15
            value = float(np.float32(norm)) if fine and abs(norm) >= 1e-12 else 0.0
            expected = theirs.see(value, None, bool(fine), restart).scale
            if not np.isclose(scale, expected, rtol=1e-4, atol=1e-29):
                wrong += not ties.close
                break
            compared += 1
    assert not wrong
    assert compared > 0.9 * 150 * 12


class _Settings:
    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)


def test_numpy_jax_and_torch_agree_bit_for_bit():
    trace = fuzz.signals(np.random.default_rng(8), 120, 8, wild=True)
    engine = Engine(CONFIG)
    norms = np.asarray(trace.update_norm)
    change = np.asarray(trace.change_expected)
    skipped = np.random.default_rng(9).random(norms.shape) < 0.05

    def one(state: Any, norm: Any, restart: Any, skip: Any, *, xp: Any) -> Any:
        signals = Signals(grad_norm=norm, change_expected=restart)
        state, _ = engine.step(state, signals, xp=xp)
        return engine.clip_update(state, norm, skip, xp=xp)

    def in_numpy() -> list[np.ndarray]:
        state, out = engine.init(batch=(8,)), []
        for row in zip(norms, change, skipped, strict=True):
            state, scale = one(state, *row, xp=np)
            out.append(scale)
        return out

    def in_jax() -> list[np.ndarray]:
        state, out = jax.tree.map(jnp.asarray, engine.init(batch=(8,))), []
        step = jax.jit(lambda *args: one(*args, xp=jax_namespace))
        for row in zip(norms, change, skipped, strict=True):
            state, scale = step(state, *map(jnp.asarray, row))
            out.append(np.asarray(scale))
        return out

    def in_torch() -> list[np.ndarray]:
        xp = torch_namespace.on(torch.device("cpu"))
        state, out = jax.tree.map(torch.from_numpy, engine.init(batch=(8,))), []
        for row in zip(norms, change, skipped, strict=True):
            state, scale = one(state, *map(torch.from_numpy, row), xp=xp)
            out.append(scale.numpy())
        return out

    expected = np.stack(in_numpy())
    assert (expected < 1).any()
    assert (expected == 1).any()
    for found in (in_jax(), in_torch()):
        np.testing.assert_array_equal(np.stack(found).view(np.int32), expected.view(np.int32))


@hypothesis.settings(max_examples=15, **BOUNDED)
@hypothesis.given(
    st.lists(
        st.tuples(
            st.floats(width=32) | st.sampled_from([0.0, 1e-20, 1e15, 3e38]) | st.floats(0.5, 2.0),
            st.booleans(),
            st.sampled_from([False] * 9 + [True]),
        ),
        max_size=80,
    ),
    st.floats(0.125, 1024.0, width=32),
)
def test_any_history_leaves_a_finite_state_and_nothing_locks_in(history, level):
    runner = Runner(CONFIG)
    for norm, skip, change in history:
        runner.step(grad_norm=1.0, change_expected=change)
        runner.state, scale = runner.engine.clip_update(
            runner.state, np.float32(norm), np.bool_(skip), xp=np
        )
        assert 0 <= scale <= 1
        assert scale == 1 or not skip
    runner.engine.from_dict(runner.engine.to_dict(runner.state))  # raises unless it is finite
    for _ in range(120):
        runner.step(grad_norm=1.0)
        runner.state, scale = runner.engine.clip_update(
            runner.state, np.float32(level), np.False_, xp=np
        )
    assert scale == 1, "a level that stays becomes the baseline"
