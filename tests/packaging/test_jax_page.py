"""The programs of docs/jax.md, docs/flax.md and docs/scan.md run."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import protect
from tests.packaging.page_text import blocks, text

OPTIMIZER, SKIPPED, LOOP, HALF_PRECISION = blocks("jax.md")
NNX, LINEN, EQUINOX = blocks("flax.md")
(SCAN,) = blocks("scan.md")


@pytest.fixture(scope="module")
def first_program() -> dict[str, Any]:
    """The names of the first snippet, from which each other snippet takes names."""
    names: dict[str, Any] = {}
    exec(OPTIMIZER, names)
    return names


@pytest.fixture
def names(
    first_program: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The names of the first snippet, for one test, which runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return dict(first_program)


BAD = jnp.full((32, 8), jnp.nan)
"""A batch of NaN, of the size of the page's batches."""


def assert_completed(healer: Any, steps: int = 50) -> None:
    assert healer.step == steps
    assert healer.report().ending == "completed"


@pytest.mark.slow
def test_the_snippet_about_a_skipped_step(names, capsys):
    exec(SKIPPED, {**names, "loader": [BAD]})
    assert capsys.readouterr().out == "1\n1\n"


@pytest.mark.slow
def test_the_snippet_with_a_loop_completes(names):
    exec(LOOP, names)
    assert_completed(names["healer"])


@pytest.mark.slow
def test_the_nnx_snippet_keeps_the_statistics_on_a_bad_batch(names):
    flax = pytest.importorskip("flax")
    exec(NNX, names)
    assert_completed(names["healer"])

    # A bad batch changes no statistics.
    norm = names["norm"]
    mean = norm.mean[...]
    assert mean.any()
    names["nnx_step"](names["model"], names["optimizer"], BAD)
    assert jnp.array_equal(mean, norm.mean[...])

    # As the page says, a jitted function that only closes over the model raises.
    closed = flax.nnx.jit(lambda batch: names["loss_of"](names["model"], batch))
    with pytest.raises(flax.errors.TraceContextError):
        closed(names["loader"][0])


@pytest.mark.slow
def test_the_linen_snippet(names):
    pytest.importorskip("flax")
    exec(LINEN, names)
    assert_completed(names["healer"])
    trained = names["healer"].state
    assert names["trained"] is trained.params
    assert names["train_state"] is trained
    assert not jnp.array_equal(trained.batch_stats["BatchNorm_0"]["mean"], jnp.zeros(8))

    # A bad batch changes no statistics.
    after_bad, _ = names["linen_step"](trained, BAD)
    for statistic in jax.tree.leaves(trained.batch_stats):
        assert jnp.isfinite(statistic).all()
    jax.tree.map(np.testing.assert_array_equal, trained.batch_stats, after_bad.batch_stats)


@pytest.mark.slow
def test_the_half_precision_snippet(names):
    exec(HALF_PRECISION, names)
    half_step, state = names["half_step"], names["state"]

    # A good batch is trained with the scale, and an overflow halves the scale.
    after_good, scale = half_step(state, names["loader"][0], 2.0**3)
    after_bad, smaller_scale = half_step(after_good, BAD, 2.0**3)
    assert (scale, smaller_scale) == (2.0**3, 2.0**2)
    assert not jnp.array_equal(after_good[0]["w"], state[0]["w"])
    assert jnp.array_equal(after_bad[0]["w"], after_good[0]["w"])


@pytest.mark.slow
def test_the_scan_snippet(names):
    exec(SCAN, names)
    assert names["healer"].step == 1000
    assert names["losses"].shape == (1000,)
    assert names["losses"][-1] < names["losses"][0]


@pytest.mark.slow
def test_the_equinox_snippet(names):
    pytest.importorskip("equinox")
    exec(EQUINOX, names)
    _, loss = names["train_step"](names["state"], names["loader"][0])
    assert jnp.isfinite(loss)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        optax.adamw,
        lambda schedule: optax.chain(optax.adamw(schedule), optax.add_decayed_weights(0.1)),
        lambda schedule: optax.chain(optax.clip(10.0), optax.adamw(schedule)),
    ],
    ids=["alone", "first of a chain", "last of a chain"],
)
def test_the_rate_that_the_page_names_is_that_of_the_step_also_after_a_skip(
    optimizer_of,
):
    found = re.search(r"`(schedule\(optax\.tree[^`]*)`", text("jax.md"))
    assert found
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = protect(optimizer_of(schedule))
    params = {"w": jnp.ones(3)}
    opt_state = tx.init(params)
    rates = []
    for grad in (1.0, jnp.nan, 1.0):
        scope = {"optax": optax, "schedule": schedule, "opt_state": opt_state}
        rates.append(float(eval(found[1], scope)))
        grads = {"w": jnp.full(3, grad)}
        opt_state = tx.update(grads, opt_state, params, value=1.0, learning_rate=rates[-1])[1]
    assert rates == pytest.approx([1.0, 0.9, 0.9])
