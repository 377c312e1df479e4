"""`[update_clip]` within `protect`: the update is shortened before it is applied."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.clipping import UpdateClipConfig
from healcore.core.engine import Engine
from healcore.jax import heal, metrics, protect, to_dict
from tests.jax import policies

CLIPS = policies.SKIP._replace(
    update_clip=UpdateClipConfig(warmup_steps=4), detectors=policies.SKIP.detectors[:1]
)


def run(norms: list[float], policy: Any = CLIPS, inner: Any = None) -> tuple[list[float], Any]:
    """Lengths of the updates of SGD on gradients of these norms, and the last state."""
    tx = protect(inner or optax.sgd(1.0), policy)
    params = {"w": jnp.zeros((2, 2))}
    state, update, moved = tx.init(params), jax.jit(tx.update), []
    for norm in norms:
        grads = {"w": jnp.full((2, 2), norm / 2)}
        updates, state = update(grads, state, params)
        moved.append(float(jnp.linalg.norm(updates["w"])))
    return moved, state


def test_an_update_that_stands_out_is_shortened_and_moments_are_not():
    norms = [1.0, 1.1, 0.9, 1.0, 1.05, 64.0, 1.0]
    moved, _ = run(norms)
    np.testing.assert_allclose(moved[:5], norms[:5], rtol=1e-6)
    assert 1.0 < moved[5] < 1.5
    assert moved[6] == pytest.approx(1.0, rel=1e-6)
    momentum = optax.sgd(1.0, momentum=0.9)
    _, ours = run(norms, inner=momentum)
    plain = momentum.init({"w": jnp.zeros((2, 2))})
    for norm in norms:
        _, plain = momentum.update({"w": jnp.full((2, 2), norm / 2)}, plain)
    np.testing.assert_allclose(ours.inner_state[0].trace["w"], plain[0].trace["w"], rtol=1e-6)


def test_skips_bad_updates_and_observe_mode():
    ordinary = [1.0, 1.1, 0.9, 1.0]
    moved, state = run([*ordinary, np.nan, 1.0])
    assert moved[4] == 0
    assert clip_of(state)["rule"]["count"] == 4
    moved, state = run([*ordinary, 64.0], CLIPS._replace(mode="observe"))
    assert moved[-1] == 64.0
    assert clip_of(state, CLIPS._replace(mode="observe"))["clips"] == 1


def test_the_baseline_does_not_follow_a_cut_of_the_learning_rate():
    policy = policies.CUT_LR._replace(update_clip=UpdateClipConfig(warmup_steps=4))
    ordinary = [1.0, 1.1, 0.9, 1.0] * 2
    moved, state = run([*ordinary, np.nan, *ordinary, 64.0], policy)
    assert moved[9] == pytest.approx(0.5)
    assert clip_of(state, policy)["rule"]["mean"] == pytest.approx(1.0, abs=0.05)
    assert 0.5 < moved[-1] < 0.8


def test_it_decides_as_torch_does_on_the_same_norms():
    """The engine's state after the same updates, as JSON, from the two adapters."""
    import torch

    import healcore.torch

    norms = [1.0, 1.125, 0.875, 1.0, 1.0625, 64.0, 1.0, np.nan, 3.0, 1.0]
    p = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    handle = healcore.torch.attach(optimizer, Engine(CLIPS))
    for norm in norms:
        p.data.zero_()  # so that the difference is the update itself
        p.grad = torch.full((2, 2), norm / 2)
        optimizer.step()
    state = run(norms)[1]
    assert clip_of(state) == handle.state_dict()["state"]["update_clip"]
    logged, there = metrics(state, CLIPS), handle.metrics()
    assert logged.keys() == there.keys()
    named = [name for name in logged if "update" in name]
    assert len(named) == 3
    assert {name: float(logged[name]) for name in named} == {n: float(there[n]) for n in named}


def test_it_takes_protect():
    with pytest.raises(ValueError, match="protect"):
        heal(CLIPS)


def clip_of(state: Any, policy: Any = CLIPS) -> Any:
    return to_dict(state, policy)["state"]["update_clip"]
