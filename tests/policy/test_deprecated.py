"""Names and keys that healcore 0.6 removes: each warns, and says what to write instead."""

import warnings

import pytest

import healcore
from healcore import policy as policies
from healcore.runtime.data import Cursor


def test_a_policy_that_gives_alert_steps_warns():
    with pytest.deprecated_call(match="incident.alert_steps .* incident.quiet_steps") as caught:
        policies.load("default", incident={"alert_steps": 1})
    assert caught[0].filename == __file__

    text = 'schema = 1\nname = "mine"\n[detect.nonfinite]\n[incident]\nalert_steps = 5\n'
    with pytest.deprecated_call():
        policies.loads(text)


def test_policies_without_the_key_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in (*policies.preset_names(), *policies.recipe_names()):
            policy = policies.load(name)
            assert policies.from_dict(policies.to_dict(policy)) == policy


def test_the_public_name_cursor_warns_and_is_still_the_class():
    with pytest.deprecated_call(match=r"healcore.Cursor .* healer.batches\(loader\)") as caught:
        assert healcore.Cursor is Cursor
    assert caught[0].filename == __file__
