"""Rules for faults: which are valid, and that they reach the host and never the engine."""

from __future__ import annotations

import pytest

from healcore.core.engine import EngineConfig
from healcore.core.verdict import Action, Cause
from healcore.policy import PolicyError, diff, dumps, fingerprint, load, loads, preset_names
from healcore.policy.recovery import Retry, SkipBatch
from healcore.policy.respond import FAULTS
from healcore.runtime.host_policy import HostPolicy

HEAD = 'schema = 1\nname = "x"\n[detect.nonfinite]\n'
ALL = "".join(
    f'[[respond]]\nto = ["{cause}"]\ndo = {list(words)}\n' for cause, (_, words) in FAULTS.items()
)
NUMBERS = "[budget]\nshrinks = 2\n[retry]\nbase_delay_s = 30\nmax_delay_s = 600\n"


def rule(to: list[str], do: list[str], more: str = "") -> str:
    return f"{HEAD}[[respond]]\nto = {to}\ndo = {do}\n{more}"


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
    text = rule(["oom"], ["clear_cache"]) + '[[respond]]\nto = ["oom", "data"]\ndo = ["save"]\n'
    host = HostPolicy.of(loads(text))
    assert host.answers(Cause.OOM) == {"clear_cache", "save"}
    assert host.answers(Cause.DATA) == {"save"}


def test_a_policy_that_observes_answers_nothing():
    host = HostPolicy.of("default", {"mode": "observe"})
    assert host.faults
    assert not any(host.answers(flag) for flag, _ in FAULTS.values())


def test_an_engine_has_no_rules_for_faults():
    host = HostPolicy.of(EngineConfig())
    assert not any(host.answers(flag) for flag, _ in FAULTS.values())
    assert host.retry == Retry()


def test_diff_shows_them():
    differing = {each.key for each in diff(load("default"), load("default", retry={"attempts": 2}))}
    assert differing == {"retry.attempts"}


@pytest.mark.parametrize(
    ("text", "key", "write"),
    [
        (rule(["oom", "nonfinite"], ["save"]), "respond[0].to[1]", "separate"),
        (rule(["oom"], ["rollback"]), "respond[0].do[0]", "drop"),
        (rule(["network"], ["skip_batch"]), "respond[0].do[0]", "drop"),
        (rule(["nonfinite"], ["retry"]), "respond[0].do[0]", "drop"),
        (rule(["hang"], ["save"]), "respond[0].do[0]", "drop"),
        (rule(["oom"], ["save"], "when = { consecutive = 2 }\n"), "respond[0].when", "drop"),
        (
            rule(["oom"], ["shrink_microbatch"], "[budget]\nshrinks = 0\n"),
            "respond[0].do[0]",
            "budget.shrinks = 3",
        ),
        (HEAD + "[retry]\nbase_delay_s = 90\n", "retry.base_delay_s", "60"),
        (HEAD + "[retry]\nattempts = 0\n", "retry.attempts", "attempts = 8"),
        (HEAD + "[hang]\ntimeout_s = 0\n", "hang.timeout_s", "timeout_s = 300"),
        (HEAD + "[skip_batch]\ncount = 2\n", "skip_batch.consecutive", "= 2"),
        (HEAD + "[skip_batch]\nwithin = 5\n", "skip_batch.count", "= 5"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(text, key, write):
    with pytest.raises(PolicyError) as caught:
        loads(text)
    problem = caught.value.problems[0]
    assert problem.key == key
    assert write in problem.write


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
    assert (policy.retry.base_delay_s, policy.retry.factor, policy.retry.max_delay_s) == (
        30,
        2,
        600,
    )
    assert policy.budget.shrinks == 3
    assert policy.skip_batch == SkipBatch()


def test_saves_on_the_host_are_no_orders_of_the_engine():
    rules = load("default").config().rules
    assert not any(each.action & Action.SAVE for each in rules)
