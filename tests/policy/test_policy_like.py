"""Everything with a `policy` argument accepts the same forms of a policy."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import optax
import pytest
import torch

import healcore
from healcore.core.engine import Engine, EngineConfig, RollbackConfig
from healcore.policy import PolicyError, engine_of, load, preset_text
from healcore.runtime.host_policy import HostPolicy

FINGERPRINT = load("default").engine().fingerprint


def by_attach(policy, **overrides):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    return healcore.torch.attach(optimizer, policy, **overrides).engine.fingerprint


def by_protect(policy, **overrides):
    return in_jax(healcore.jax.protect(optax.sgd(0.1), policy, **overrides), policy, overrides)


def by_heal(policy, **overrides):
    return in_jax(healcore.jax.heal(policy, **overrides), policy, overrides)


def in_jax(tx, policy, overrides):
    if overrides:
        policy = load(policy, **overrides)
    return healcore.jax.to_dict(tx.init({"w": jnp.ones(2)}), policy)["policy"]


def by_healer(policy, **overrides):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with (
        contextlib.suppress(healcore.IncompleteRun),  # it takes no step
        healcore.Healer(policy, state=state, **overrides) as healer,
    ):
        (found,) = healer.driver.healing().values()
    return found["policy"]


def by_hand(policy, **overrides):
    return engine_of(policy, overrides).fingerprint


TAKERS = [by_hand, by_attach, by_protect, by_heal, by_healer]


@pytest.fixture(params=["name", "path", "text path", "Policy", "Engine", "EngineConfig"])
def default(request, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(preset_text("default"))
    policy = load("default")
    return {
        "name": "default",
        "path": path,
        "text path": str(path),
        "Policy": policy,
        "Engine": policy.engine(),
        "EngineConfig": policy.config(),
    }[request.param]


@pytest.mark.parametrize("take", TAKERS)
def test_every_form_is_the_same_policy(take, default):
    assert take(default) == FINGERPRINT


@pytest.mark.parametrize("take", TAKERS)
def test_overrides_are_taken_with_a_document_and_refused_with_an_engine(take, default):
    if isinstance(default, Engine | EngineConfig):
        with pytest.raises(PolicyError, match="where clip is given as a keyword"):
            take(default, clip={"max_norm": 1.5})
    else:
        wanted = load("default", clip={"max_norm": 1.5}).engine().fingerprint
        assert take(default, clip={"max_norm": 1.5}) == wanted != FINGERPRINT


@pytest.mark.parametrize("take", TAKERS)
def test_a_value_that_is_no_policy_is_refused_with_the_same_message(take):
    with pytest.raises(PolicyError, match="rule:  a preset's name, a path, or a Policy"):
        take(7)


def test_the_host_goes_by_the_engine_s_own_numbers():
    config = EngineConfig(rollback=RollbackConfig(region=7))
    assert HostPolicy.of(config).region == 7
    assert HostPolicy.of(Engine(config)).fingerprint == Engine(config).fingerprint
