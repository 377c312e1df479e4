"""Writing and reading back, and garbage of every kind."""

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.policy import (
    PolicyError,
    diff,
    dumps,
    fingerprint,
    from_dict,
    load,
    loads,
    preset_names,
    recipe_names,
    to_dict,
)

ALL = (*preset_names(), *recipe_names())
CASES = settings().max_examples
"""Of the profile, see tests/conftest.py."""
positive, fraction = st.floats(1e-20, 1e20), st.floats(1e-6, 0.999)
steps, some_steps = st.integers(1, 10_000_000), st.integers(0, 10_000_000)
limit = st.one_of(st.just("none"), positive)
line = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1).filter(
    lambda text: text.strip() and len(text.splitlines()) == 1
)


def table(required: Mapping[str, Any] = {}, **optional: st.SearchStrategy) -> st.SearchStrategy:
    """A table of which each optional key may be absent."""
    return st.fixed_dictionaries(dict(required), optional=optional)


def names(*choices: str) -> st.SearchStrategy:
    return st.lists(st.sampled_from(choices), min_size=1, unique=True)


RULES = table(
    {
        "to": names("nonfinite", "nonfinite_loss", "divergence"),
        "do": names("skip", "alert", "rollback", "cut_lr"),
    },
    when=table(sustained=st.booleans(), consecutive=st.integers(1, 100))
    | table({"count": st.integers(1, 9), "within": st.integers(9, 4096)}),
)
DETECT = table(
    {"nonfinite": st.just({}), "divergence": st.just({})},
    plateau=table(chance_level=st.sampled_from(["none", 0.0, 0.6931, -3.5, 1e-7])),
    vanishing=table(threshold=st.floats(1e-11, 1), patience=steps),
)
POLICIES = table(
    {"schema": st.just(1), "name": line, "detect": DETECT},
    description=st.text(st.characters(exclude_categories=["Cs"])),
    references=st.lists(line, unique=True),
    mode=st.sampled_from(["heal", "observe"]),
    grace_steps=some_steps,
    clip=table({"kind": st.just("autoclip")}, percentile=st.floats(0.1, 99), max_norm=limit)
    | table(
        {"kind": st.just("zclip")},
        z_threshold=positive,
        ema_decay=fraction,
        target=st.sampled_from(["reciprocal", "mean", "max"]),
        shift=table(patience=st.integers(1, 10**6), gain=st.integers(1, 1000)),
    ),
    respond=st.lists(RULES, max_size=4),
    lr=table(factor=st.floats(0.2, 0.9), hold_steps=some_steps),
)


@given(POLICIES)
def test_text_and_dict_round_trip_exactly(data):
    policy = from_dict(data)
    text = dumps(policy)
    assert loads(text) == policy
    assert dumps(loads(text)) == text
    assert from_dict(json.loads(json.dumps(to_dict(policy)))) == policy
    assert fingerprint(loads(text)) == fingerprint(policy)
    assert diff(policy, loads(text)) == ()
    assert policy.engine().init(groups=1) is not None
    # What was given is in it, digit for digit.
    assert contained(data, tomllib.loads(text))


def contained(part, whole) -> bool:
    if isinstance(part, dict):
        return all(contained(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return all(map(contained, part, whole)) and len(part) == len(whole)
    return part == whole


LEAVES = st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.dates()
anything = st.recursive(
    st.one_of(*LEAVES),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)


@given(st.one_of(anything, st.dictionaries(st.text(), anything)))
def test_garbage_is_a_policy_error(data):
    with pytest.raises(PolicyError) as caught:
        from_dict(data)
    assert str(caught.value)


@st.composite
def damaged(draw):
    """A preset in which one value, at any depth, is replaced, or one key is added."""
    data = to_dict(load(draw(st.sampled_from(ALL))))
    place = data
    while True:
        values = place.values() if isinstance(place, dict) else place
        inner = [each for each in values if each and isinstance(each, dict | list)]
        if not inner or draw(st.booleans()):
            break
        place = draw(st.sampled_from(inner))
    if isinstance(place, list):
        place[draw(st.integers(0, len(place) - 1))] = draw(anything)
    else:
        keys = st.one_of(st.sampled_from(sorted(place)), st.text()) if place else st.text()
        place[draw(keys)] = draw(anything)
    return data


@given(damaged())
@settings(max_examples=3 * CASES)
def test_a_damaged_preset_loads_or_is_a_policy_error(data):
    try:
        policy = from_dict(data)
    except PolicyError as error:
        assert str(error)
    else:
        assert loads(dumps(policy)) == policy
