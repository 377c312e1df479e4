"""Rules for faults: which are valid, and that they reach the host and never the engine."""

from __future__ import annotations

import pytest

from healcore.core.engine import EngineConfig
from healcore.core.verdict import Cause
from healcore.policy import dumps, fingerprint, load, loads, preset_names
from healcore.policy.answers import FAULTS, Retry, SkipBatch
from healcore.runtime.host_policy import HostPolicy

HEAD = 'schema = 1\nname = "x"\n[detect.nonfinite]\n'
ALL = "".join(
    f'[[respond]]\nto = ["{cause}"]\ndo = {list(words)}\n' for cause, (_, words) in FAULTS.items()
)
NUMBERS = "[budget]\nshrinks = 2\n[retry]\nbase_delay_s = 30\nmax_delay_s = 600\n"


def test_every_fault_and_every_answer_can_be_written_and_reaches_the_host():
    policy = loads(HEAD + ALL + NUMBERS)
    assert loads(dumps(policy)) == policy
    host = HostPolicy.of(policy)
    for flag, words in FAULTS.values():
        assert host.answers(flag) == set(words)
    assert (host.budget.shrinks, host.retry.base_delay_s, host.retry.max_delay_s) == (2, 30, 600)


def test_nothing_of_it_reaches_the_engine():
    with_faults, without = loads(HEAD + ALL + NUMBERS), loads(HEAD)
    assert with_faults.config() == without.config()
    assert fingerprint(with_faults) == fingerprint(without)
    on_the_device = [cause for cause in Cause if cause < Cause.OOM]
    assert not any(flag in on_the_device for flag, _ in FAULTS.values())


def test_rules_for_the_same_fault_add_up():
    rules = [{"to": ["oom"], "do": ["clear_cache"]}, {"to": ["oom", "data"], "do": ["save"]}]
    host = HostPolicy.of(load("zclip", respond=rules))
    assert host.answers(Cause.OOM) == {"clear_cache", "save"}
    assert host.answers(Cause.DATA) == {"save"}


def test_an_observing_policy_and_an_engine_answer_nothing():
    for host in (HostPolicy.of("default", {"mode": "observe"}), HostPolicy.of(EngineConfig())):
        assert not any(host.answers(flag) for flag, _ in FAULTS.values())
        assert host.retry == Retry()


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "zclip"])
def test_the_presets_answer_all_faults(name):
    host = load(name).fault_actions()
    assert host == {
        Cause.OOM: {"shrink_microbatch", "clear_cache", "save"},
        Cause.DATA: {"skip_batch", "save"},
        Cause.NETWORK: {"retry", "save"},
        Cause.HANG: {"alert"},
        Cause.UNKNOWN: {"save"},
    }


@pytest.mark.parametrize("name", ["default", "aggressive", "conservative"])
def test_the_published_system_with_its_own_numbers(name):
    policy = load(f"self-healing-trl-{name}")
    assert policy.fault_actions() == {  # it saves for what it does not know, and for nothing else
        Cause.OOM: {"shrink_microbatch", "clear_cache"},
        Cause.DATA: {"skip_batch"},
        Cause.NETWORK: {"retry"},
        Cause.UNKNOWN: {"save"},
    }
    assert policy.retry[:3] == (30, 2, 600)
    assert policy.budget.shrinks == 3
    assert policy.skip_batch == SkipBatch()
