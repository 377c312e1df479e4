"""A state has no framework and is never changed in place; its saved form is exact and checked."""

import copy
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import healcore.jax.compilation  # noqa: F401  # registers the namespace of JAX arrays
from healcore.core.engine import Engine, StateError
from healcore.core.engine.state import record_numbers
from healcore.core.signals import Signals
from healcore.core.step_record import host_record
from healcore.core.tape import NotRecordable, to_program
from healcore.core.trees import map_leaves
from healcore.policy import engine_of
from tests.core import fuzz, policies
from tests.core.engine_runner import leaves


def test_a_branch_on_a_value_is_refused_where_a_step_is_recorded():
    with pytest.raises(NotRecordable, match=r"xp\.where"):
        to_program(lambda x: 1 if x > 0 else x, np.float32(1))


def test_a_method_of_an_array_is_refused_where_a_step_is_recorded():
    """It would compute with the example's values, as a constant of each later step."""
    with pytest.raises(AttributeError, match="max"):
        to_program(lambda x: x.max() + x, np.ones(2, np.float32))


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_a_traced_step_has_no_branch_and_keeps_its_types(clip):
    """Tracing fails on `if array:`; a type that changed would be traced again at the next step."""
    groups = policies.GROUPS if clip == "adagc" else 0
    engine = Engine(policies.full(clip))
    state = map_leaves(jnp.asarray, engine.init(groups=groups))
    signals = fuzz.at(fuzz.signals(np.random.default_rng(0), 1, 1, groups=groups), 0, 0)
    signals = map_leaves(jnp.asarray, signals)
    after, decision = jax.eval_shape(engine.step, state, signals)
    assert after == jax.eval_shape(lambda s: s, state)
    again, same = jax.eval_shape(engine.step, after, signals)
    assert (again, same) == (after, decision)
    limited = jax.eval_shape(engine.limit_norm, state, jnp.float32(1))
    assert limited == after
    kinds = {"grad_scale": "f4", "lr_scale": "f4", "skip": "?", "group_scale": "f4"}
    for name, value in decision._asdict().items():
        assert value is None or value.dtype == np.dtype(kinds.get(name, "i4")), name


def test_a_step_writes_into_nothing_it_was_given():
    engine = Engine(policies.full("zclip"))
    state = engine.init()
    trace = fuzz.signals(np.random.default_rng(2), 30, 1)
    for i in range(30):
        before = map_leaves(lambda leaf: np.array(leaf), state)
        after, _ = engine.step(state, fuzz.at(trace, i, 0))
        for a, b in zip(leaves(before), leaves(state), strict=True):
            np.testing.assert_array_equal(a, b)
        state = after


@functools.cache
def after_steps(clip: str, steps: int = 80):
    groups = policies.GROUPS if clip == "adagc" else 0
    engine = Engine(policies.full(clip))
    trace = fuzz.signals(np.random.default_rng(8), steps, 1, groups=groups)
    state = engine.init(groups=groups)
    for i in range(steps):
        state, _ = engine.step(state, fuzz.at(trace, i, 0))
    return engine, state


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_json_restores_a_state_to_the_bit(clip):
    engine, state = after_steps(clip)
    state = engine.limit_norm(state, np.float32(0.1))
    text = json.dumps(engine.to_dict(state), allow_nan=False)
    back = engine.from_dict(json.loads(text))
    fresh = engine.init(groups=policies.GROUPS if clip == "adagc" else 0)
    for a, b, c in zip(leaves(state), leaves(back), leaves(fresh), strict=True):
        assert isinstance(b, np.ndarray)
        assert b.dtype == c.dtype
        assert b.shape == c.shape
        assert np.asarray(a).tobytes() == b.tobytes()


def broken(data: dict[str, Any], *path: Any, value: Any = ...) -> dict[str, Any]:
    """A copy with one entry replaced, or taken out."""
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


DAMAGE = [
    (("schema",), ...),
    (("schema",), 10),
    (("policy",), "0123456789abcdef"),
    (("state", "budget", "recoveries"), ...),
    (("state", "budget", "luck"), 3),
    (("state", "clip", "mean"), 1e39),
    (("state", "change_expected"), 1),
    (("state", "norm_limit"), ...),
    (("state", "rules", "3", "window"), [0, [1]]),
    (("groups",), 10**12),
]
"""Where an entry is missing (...) or another; junk is in the last test."""


@pytest.mark.parametrize(("path", "value"), DAMAGE)
def test_damaged_data_is_refused(path, value):
    engine, state = after_steps("zclip")
    data = broken(json.loads(json.dumps(engine.to_dict(state))), *path, value=value)
    before = copy.deepcopy(data)
    with pytest.raises(StateError) as caught:
        engine.from_dict(data)
    assert len(str(caught.value)) > 20
    assert repr(data) == repr(before), "what is refused is left as it was"


def test_the_error_names_what_differs_in_the_policy():
    engine = Engine(policies.full("zclip"))
    clip = engine.config.clip._replace(z_threshold=np.float32(3.1))
    other = Engine(engine.config._replace(clip=clip))
    saved = json.loads(json.dumps(engine.to_dict(engine.init())))
    with pytest.raises(StateError, match=r"another policy \(clip.z_threshold: 2.5, now 3.1\)"):
        other.from_dict(saved)


def test_another_number_of_tensors_is_taken_from_the_data():
    engine = Engine(policies.full("adagc"))
    data = engine.to_dict(engine.init(groups=7))
    assert engine.from_dict(data).clip.gamma.shape == (7,)


def test_no_random_damage_gets_through_or_crashes():
    """Any one entry, replaced by any junk: refused with a StateError, or an equal value."""
    rng = np.random.default_rng(0)
    engine, state = after_steps("autoclip", 30)
    data = json.loads(json.dumps(engine.to_dict(state)))
    junk = [None, "x", float("nan"), [], {}, 2**70, -1.5, [[1], 2], b"\0"]
    for _ in range(100):
        path = []
        place = data
        while isinstance(place, dict | list) and len(place):
            keys = list(place) if isinstance(place, dict) else range(len(place))
            path.append(keys[int(rng.integers(len(keys)))])
            place = place[path[-1]]
        value = junk[int(rng.integers(len(junk)))]
        number = isinstance(place, float) and value in (2**70, -1.5)
        if value != place and not number and path != ["policy"]:
            with pytest.raises(StateError):
                engine.from_dict(broken(data, *path, value=value))


@pytest.mark.parametrize(
    ("preset", "given", "read"),
    [
        ("default", None, None),
        ("default", np.nan, None),
        ("default", 0.0, 0.0),
        ("default", 0.3, pytest.approx(0.3)),
        ("default", 1.0, 1.0),
        ("zclip", 1.0, None),  # no rule reads the rate
    ],
)
def test_a_record_has_the_rate_of_its_step_or_none(preset, given, read):
    engine = engine_of(preset)
    rate = None if given is None else np.float32(given)
    signals = Signals(loss=np.float32(1), grad_norm=np.float32(1), learning_rate=rate)
    assert host_record(record_numbers(engine.init())).lr is None
    state, _ = engine.step(engine.init(), signals)
    saved = engine.from_dict(json.loads(json.dumps(engine.to_dict(state))))
    for each in (state, saved):
        assert host_record(record_numbers(each)).lr == read


def test_the_last_finite_loss_of_an_alarm_may_be_0():
    """It is NaN only if no loss was finite."""
    engine = engine_of("default")
    read = []
    for losses in ((np.nan,), (0.0, np.nan)):
        state = engine.init()
        for loss in losses:
            state, _ = engine.step(state, Signals(loss=np.float32(loss), grad_norm=np.float32(1)))
        read.append(float(host_record(record_numbers(state)).readings.loss))
    np.testing.assert_equal(read, [np.nan, 0.0])
