"""NumPy, JAX jit + scan and torch eager, bit for bit, on fuzzed steps and random policies.

JAX runs lane after lane on 0-d arrays, as in a training step, and for one policy also all lanes
at once: XLA compiles the two differently. Under `stress` there are millions of steps.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core.array_namespace import ArrayNamespace
from healcore.core.decision import Action
from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.core.tape import to_program
from healcore.core.trees import map_leaves
from healcore.policy import load, preset_names, recipe_names
from tests.core import fuzz, policies
from tests.core.engine_runner import leaves
from tests.core.random_policies import BOUNDED, engine_configs
from tests.parity import lockstep

STEPS, LANES = 150, 100
SCALARS, KERNEL = ("jax-scalars", "torch"), ("jax-kernel", "torch")
EVERY = ("jax-scalars", "jax-kernel", "torch")


def groups_of(clip: str | None) -> int:
    return policies.GROUPS if clip == "adagc" else 0


@pytest.mark.parametrize(
    ("name", "against"),
    [
        # Each rule and each backend. Compiling takes most of the time, so all pairs are `slow`.
        ("zclip", KERNEL),
        ("fixed", (*SCALARS, "jax")),
        ("autoclip", SCALARS),
        ("adagc", KERNEL),
        pytest.param("zclip", (*EVERY, "jax"), marks=pytest.mark.slow),
        *(
            pytest.param(name, EVERY, marks=pytest.mark.slow)
            for name in (*policies.CLIPS, "catalogue")
            if name != "zclip"
        ),
    ],
)
def test_numpy_jax_and_torch_have_the_same_bits(name, against):
    """The detectors of the catalogue in one policy: it is compiled once."""
    groups = groups_of(name)
    published = policies.only(*policies.PUBLISHED)
    trace = fuzz.signals(np.random.default_rng(len(name)), STEPS, LANES, groups=groups)
    config = policies.covering(name) if name in policies.CLIPS else published
    compared = lockstep.steps_equal(config, [trace], against, groups=groups, lanes=LANES)
    assert compared == STEPS * LANES


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [*policies.CLIPS, *policies.PUBLISHED])
def test_backends_agree_on_long_random_traces(name, seed):
    groups = groups_of(name)
    lanes = 100 if name == "autoclip" else 1000
    config = policies.full(name) if name in policies.CLIPS else policies.only(name)
    trace = fuzz.signals(np.random.default_rng(1000 + seed), 1000, lanes, groups=groups)
    against = ("jax-scalars", "jax-kernel", "jax", "torch")
    lockstep.steps_equal(config, [trace], against, groups=groups, lanes=lanes)


@pytest.mark.slow
@pytest.mark.parametrize("clip", policies.CLIPS)
def test_a_lane_is_a_run_of_its_own(clip):
    """In NumPy, recorded and in torch with 0-d arrays; JAX is further down."""
    groups = groups_of(clip)
    config = policies.covering(clip)
    trace = fuzz.signals(np.random.default_rng(42), STEPS, 12, groups=groups)
    engine = Engine(config)
    fresh = engine.init(groups=groups, batch=(12,))
    _, *together = lockstep.runner("numpy", engine)(fresh, trace)
    alone = lockstep.runner("recorded", engine)
    for lane in range(0, 12, 3):
        fresh = lockstep.start("recorded", engine.init(groups=groups))
        _, *single = alone(fresh, lockstep.scalar(trace, lane))
        mine = map_leaves(lambda leaf, lane=lane: leaf[:, lane], tuple(together))
        assert lockstep.first_difference(mine, tuple(single)) is None
    one = [lockstep.scalar(trace, 0)]
    lockstep.steps_equal(config, one, ("torch",), groups=groups, reference="recorded")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "steps", "lanes", "against"),
    [
        (12, 50, 30, ("torch",)),
        (12, 100, 1, ("recorded",)),
        (2, 100, 30, ("jax-scalars",)),  # each policy is a program of its own to compile
        pytest.param(60, 200, 100, ("jax-scalars", "jax", "torch"), marks=pytest.mark.stress),
        pytest.param(60, 200, 1, ("recorded",), marks=pytest.mark.stress),
    ],
)
def test_random_policies_have_the_same_bits(examples, steps, lanes, against):
    @settings(max_examples=examples, **BOUNDED)
    @given(config=engine_configs(), seed=st.integers(0, 1 << 20))
    def compared(config, seed):
        groups = groups_of(config.clip and config.clip.kind)
        trace = fuzz.signals(np.random.default_rng(seed), steps, lanes, groups=groups)
        if lanes == 1:
            trace = lockstep.scalar(trace, 0)
        batch = lanes if lanes > 1 else 0
        lockstep.steps_equal(config, [trace], against, groups=groups, lanes=batch)

    compared()


# -- a run that moves through JSON from framework to framework decides as one that never moved -----

LEGS = ("jax", "torch", "numpy", "recorded", "jax", "recorded", "torch")
CHUNK = 30


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["zclip", "adagc"])
def test_a_run_moves_from_jax_to_torch_to_numpy_and_decides_alike(clip):
    groups = groups_of(clip)
    engine = Engine(policies.covering(clip))
    runs = {name: lockstep.runner(name, engine) for name in LEGS}
    whole = fuzz.signals(np.random.default_rng(60), len(LEGS) * CHUNK, 3, groups=groups)
    for lane in range(3):
        trace = lockstep.scalar(whole, lane)
        fresh = engine.init(groups=groups)
        there = lockstep.start("recorded", fresh)
        state = fresh
        for leg, name in enumerate(LEGS):
            piece = fuzz.part(trace, leg * CHUNK, (leg + 1) * CHUNK)
            after, *moved = runs[name](lockstep.start(name, state), piece)
            there, *stayed = runs["recorded"](there, piece)
            assert lockstep.first_difference(tuple(stayed), tuple(moved)) is None
            # Every backend's state has the same neutral form.
            text = json.dumps(engine.to_dict(after), sort_keys=True)
            assert text == json.dumps(engine.to_dict(there), sort_keys=True), name
            state = engine.from_dict(json.loads(text))
            assert all(isinstance(leaf, np.ndarray) for leaf in leaves(state))


# -- every policy there is, recorded: the bits of the engine itself --------------------------------


def drawn(engine: Any, random: np.random.Generator, externally_skipped: bool) -> Signals:
    def number(*choices: float) -> np.float32:
        return np.float32(random.choice(choices) * random.random())

    return Signals(
        loss=number(1, 1, 9, np.nan),
        grad_norm=number(1, 1, 50, np.inf),
        group_norms=np.float32(random.random(policies.GROUPS)) if engine.per_tensor else None,
        eval_loss=number(1, np.nan) if "eval_loss" in engine.needs else None,
        externally_skipped=np.bool_(random.random() < 0.3) if externally_skipped else None,
        learning_rate=number(1) if engine.limits_lr else None,
    )


@pytest.mark.parametrize(
    ("name", "externally_skipped"),
    [
        *((name, False) for name in recipe_names()),
        *((name, True) for name in preset_names()),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in recipe_names()),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in preset_names()),
    ],
)
def test_the_recorded_step_is_the_step(name: str, externally_skipped: bool):
    engine = load(name).engine()
    random = np.random.default_rng(1)
    state = mine = lockstep.start("recorded", engine.init(groups=policies.GROUPS))
    program = to_program(engine.step, state, drawn(engine, random, externally_skipped))
    for i in range(60):
        seen = drawn(engine, random, externally_skipped)
        with np.errstate(all="ignore"):
            new = engine.step(state, seen)
            state, decision = map_leaves(lambda leaf: leaf[()], new)
            mine, ours = program(mine, seen)
        for a, b in zip(leaves((state, decision)), leaves((mine, ours)), strict=True):
            assert type(a) is type(b), i
            assert a.dtype == b.dtype, i
            assert a.tobytes() == b.tobytes(), i


def test_the_sign_of_zero_a_dtype_and_a_shape_are_differences():
    a = np.zeros(3, np.float32)
    assert lockstep.first_difference((a,), (a.copy(),)) is None
    for b in (-a, np.float64(a), a[:, None]):
        assert lockstep.first_difference((a,), (b,)) is not None


def test_a_fused_multiply_add_in_the_core_would_be_seen(monkeypatch):
    """The planted error: `ema` as one would write it first."""

    def ema(self, mean, value, rate, learn):
        return self.where(learn, mean + rate * (value - mean), mean)

    monkeypatch.setattr(ArrayNamespace, "ema", ema)
    only = tuple(each for each in policies.full().detectors if each[0] == "overfit")
    config = policies.full("fixed", detectors=only)
    trace = fuzz.signals(np.random.default_rng(0), 200, 100)
    a = np.float32(0.1)
    x = jnp.arange(1000, dtype=jnp.float32) / 7
    fused = jax.jit(lambda x: x + a * (x * x - x))(x)
    if np.array_equal(fused, np.asarray(x) + a * (np.asarray(x) ** 2 - np.asarray(x))):
        pytest.skip("XLA fuses nothing on this CPU")
    with pytest.raises(AssertionError, match=r"numpy and jax from step"):
        lockstep.steps_equal(config, [trace], ("jax",), lanes=100)


# -- the state stays finite, factors in [0, 1], no bad gradient is accepted ------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [*policies.CLIPS, *policies.PUBLISHED])
@pytest.mark.parametrize(
    ("steps", "lanes"), [(300, 300), pytest.param(1000, 1000, marks=pytest.mark.stress)]
)
def test_no_promise_is_broken(name, steps, lanes):
    groups = groups_of(name)
    lanes = lanes // 10 if name == "autoclip" else lanes  # which has a histogram per lane
    engine = Engine(policies.full(name) if name in policies.CLIPS else policies.only(name))
    trace = fuzz.signals(np.random.default_rng(80), steps, lanes, groups=groups)
    state = engine.init(groups=groups, batch=(lanes,))
    kinds = [(leaf.dtype, leaf.shape) for leaf in leaves(state)]
    for i in range(steps):
        signals = fuzz.at(trace, i)
        with np.errstate(all="ignore"):
            state, decision = engine.step(state, signals)
        assert signals.externally_skipped is not None
        accepted = ~decision.skip & ~signals.externally_skipped
        norms = [x for x in (signals.grad_norm, signals.group_norms) if x is not None]
        assert all(np.isfinite(x[accepted]).all() for x in norms), i
        factors = [decision.grad_scale, decision.lr_scale, decision.group_scale]
        assert all(((x >= 0) & (x <= 1)).all() for x in factors if x is not None), i
        assert (decision.lr_scale > 0).all(), i
        assert not (decision.skip & signals.externally_skipped).any(), i
        assert ((decision.rollback_depth > 0) == (decision.action & Action.ROLLBACK > 0)).all(), i
        assert all(np.isfinite(leaf).all() for leaf in leaves(state)), i
    assert [(leaf.dtype, leaf.shape) for leaf in leaves(state)] == kinds
    assert int(state.tally.skips.min()) >= 0
    assert int(state.step.max()) > 0.9 * steps
