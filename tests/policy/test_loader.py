"""Every form of a policy that functions take, and keywords that replace its values."""

from __future__ import annotations

import contextlib
from typing import Any, get_type_hints

import jax.numpy as jnp
import optax
import pytest
import torch

import healcore
from healcore.core.engine import Engine, EngineConfig
from healcore.policy import (
    Overrides,
    Policy,
    PolicyError,
    diff,
    dumps,
    engine_of,
    fingerprint,
    load,
    loads,
    preset_text,
)
from healcore.policy.tables import keys_of
from healcore.runtime.healer import Healer
from healcore.runtime.host_policy import HostPolicy


def test_one_number_changes_and_the_rest_stays():
    policy = load("default", clip={"max_norm": 1.5}, detect={"loss_spike": {"z_threshold": 9.0}})
    found = {key: (left, right) for key, left, right in diff(load("default"), policy)}
    assert found == {
        "clip.kind": ("none", "fixed"),
        "clip.max_norm": (None, 1.5),
        "detect.loss_spike.z_threshold": (5.5, 9.0),
    }
    assert fingerprint(policy) != fingerprint(load("default"))
    assert loads(dumps(policy)) == policy


def test_none_takes_a_limit_a_detector_or_all_clipping_away():
    assert load("zclip", clip={"max_norm": None}).clip.max_norm is None  # type: ignore[union-attr]
    assert load("default", detect={"vanishing": None}, respond=[]).detect.vanishing is None
    assert load("default", clip=None).clip.kind == "none"
    same = load("default", clip={"max_norm": None}, budget={"recoveries": 3}, mode="heal")
    assert same == load("default")


def test_a_detector_is_switched_on_and_lists_are_replaced():
    rule = {"to": ["plateau"], "do": ["alert"]}
    policy = load("zclip", detect={"plateau": {"patience": 50}}, respond=[rule])
    assert policy.detect.plateau is not None
    assert policy.detect.plateau.patience == 50
    assert [each.to for each in policy.respond] == [("plateau",)]


@pytest.mark.parametrize(
    ("overrides", "key", "value", "rule"),
    [
        ({"clip": {"max_norm": -1}}, "clip.max_norm", "-1", "above 0"),
        ({"clip": {"max_nrom": 1.0}}, "clip.max_nrom", "1.0", "a key of this table"),
        ({"max_skip": 3}, "max_skip", "3", "a key of this table"),
        ({"clip": 1.0}, "clip", "1.0", "a table"),
        ({"lr": None}, "lr", "None", "a table"),
        ({"mode": "watch"}, "mode", '"watch"', "one of"),
        ({"detect": {"loss_spike": None}}, "respond[", '"loss_spike"', "detector is on"),
    ],
)
def test_an_invalid_override_names_key_value_and_rule(overrides, key, value, rule):
    with pytest.raises(PolicyError) as caught:
        load("default", **overrides)
    problem = caught.value.problems[0]
    assert problem.key.startswith(key)
    assert (problem.value, rule in problem.rule) == (value, True)
    assert f"with {next(iter(overrides))} given as keywords" in str(caught.value)


def test_the_keywords_are_the_keys_of_a_file():
    assert set(get_type_hints(Overrides)) == keys_of(Policy).keys() - {"schema"}


def test_a_run_has_the_fingerprint_and_the_text_of_what_it_does():
    host = HostPolicy.of("default", {"rollback": {"probation": 7}, "clip": {"max_norm": 1.0}})
    policy = load("default", rollback={"probation": 7}, clip={"max_norm": 1.0})
    assert (host.rollback.probation, host.engine.fingerprint) == (7, fingerprint(policy))
    assert host.text is not None
    assert loads(host.text) == policy


def test_a_misspelt_option_of_the_healer_is_suggested():
    misspelt: Any = {"checkpoint": 3}
    with pytest.raises(TypeError, match="checkpoints"):
        Healer("default", state={}, **misspelt)


FINGERPRINT = load("default").engine().fingerprint


def by_attach(policy, **overrides):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    return healcore.torch.attach(optimizer, policy, **overrides).engine.fingerprint


def by_protect(policy, **overrides):
    tx = healcore.jax.protect(optax.sgd(0.1), policy, **overrides)
    policy = load(policy, **overrides) if overrides else policy
    return healcore.jax.to_dict(tx.init({"w": jnp.ones(2)}), policy)["policy"]


def by_healer(policy, **overrides):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with (
        contextlib.suppress(healcore.errors.IncompleteRun),  # it takes no step
        healcore.Healer(policy, state=state, **overrides) as healer,
    ):
        (found,) = healer._loop.driver.engines().values()
    return found["policy"]


def by_hand(policy, **overrides):
    return engine_of(policy, overrides).fingerprint


TAKERS = [by_hand, by_attach, by_protect, by_healer]


@pytest.fixture(params=["name", "path", "text path", "Policy", "Engine", "EngineConfig"])
def any_form(request, tmp_path):
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
def test_every_form_is_the_same_policy(take, any_form):
    if take not in (by_hand, by_healer) and not isinstance(any_form, str | Engine):
        return  # one function resolves the forms
    assert take(any_form) == FINGERPRINT
    if isinstance(any_form, Engine | EngineConfig):
        with pytest.raises(PolicyError, match="keyword"):
            take(any_form, clip={"max_norm": 1.5})
    else:
        wanted = load("default", clip={"max_norm": 1.5}).engine().fingerprint
        assert take(any_form, clip={"max_norm": 1.5}) == wanted != FINGERPRINT
    with pytest.raises(PolicyError, match="preset"):
        take(7)
