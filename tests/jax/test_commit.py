import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from healcore.jax import CommitError, commit
from tests.jax.bits import assert_same_bits

STATE = {
    "mean": jnp.asarray([-0.0, 1e-40, jnp.nan]),
    "half": jax.lax.bitcast_convert_type(jnp.arange(65536).astype(jnp.uint16), jnp.bfloat16),
    "count": jnp.asarray(3, jnp.int32),
    "key": jax.random.key(0),
    "none": None,
    "nested": (jnp.ones((2, 2), jnp.float16),),
}


def changed(state):
    new = jax.tree.map(lambda x: x, state)
    new["mean"] = state["mean"] * 3 + 1
    new["half"] = jnp.zeros_like(state["half"])
    new["count"] = state["count"] + 1
    new["key"] = jax.random.split(state["key"])[0]
    new["nested"] = (state["nested"][0] * jnp.inf,)
    return new


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_takes_one_state_or_the_other_bit_for_bit(transform):
    run = transform(commit)
    assert_same_bits(run(jnp.bool_(True), STATE, changed(STATE)), STATE)
    assert_same_bits(run(jnp.bool_(False), STATE, changed(STATE)), changed(STATE))


def test_selects_lane_by_lane_under_vmap():
    old, new = jnp.zeros((3, 2)), jnp.ones((3, 2))
    out = jax.vmap(commit)(jnp.asarray([True, False, True]), old, new)
    np.testing.assert_array_equal(out[:, 0], [0.0, 1.0, 0.0])


def test_python_numbers_are_taken_too():
    assert commit(jnp.bool_(True), {"step": 3}, {"step": 4})["step"] == 3


def test_float0_and_unchanged_static_leaves_pass():
    old = {"g": np.zeros((2,), jax.dtypes.float0), "name": "relu"}
    assert commit(jnp.bool_(True), old, dict(old))["name"] == "relu"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}, "one structure"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, r"\['a'\] was float32\[2\].*float32\[3\]"),
        (
            {"a": jnp.ones(2)},
            {"a": jnp.ones(2, jnp.bfloat16)},
            r"bfloat16\[2\](.|\n)*astype\(float32\)",
        ),
        ({"a": "relu"}, {"a": "gelu"}, r"\['a'\] is a str"),
    ],
)
def test_states_that_do_not_match_are_named(old, new, says):
    with pytest.raises(CommitError, match=says):
        jax.eval_shape(functools.partial(commit, old=old, new=new), jnp.bool_(True))


@pytest.mark.parametrize("skip", [jnp.asarray([True, False]), jnp.float32(1.0), 1])
def test_skip_must_be_one_bool(skip):
    with pytest.raises(CommitError, match="skip must be one bool"):
        commit(skip, {}, {})
