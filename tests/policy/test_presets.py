"""The policies that come with healcore, and rules for faults, which reach the host only."""

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.core.engine import EngineConfig
from healcore.policy import diff, dumps, fingerprint, load, loads, preset_names
from healcore.policy.document import FAULTS, Retry, SkipBatch
from healcore.runtime.run_options import HostPolicy
from tests.catalogue.curves import decisions_of, first, healthy


@pytest.mark.parametrize("name", preset_names())
def test_each_is_described_and_leaves_a_healthy_run_alone(name):
    policy = load(name)
    assert (policy.name, policy.description[-1], bool(policy.references)) == (name, ".", True)
    decisions = decisions_of(name, *healthy(steps=600)[1:])
    assert not decisions.skip.any()
    assert not decisions.action.any()
    assert (decisions.lr_scale == 1).all()


def test_nans_that_go_on_are_a_rollback_and_a_cut():
    _, losses, norms = healthy(steps=400)
    losses[200:220] = np.nan
    begins = []
    for name in ("aggressive", "pretraining", "conservative"):
        decisions = decisions_of(name, losses, norms)
        assert decisions.orders(Action.ROLLBACK).sum() == 1
        assert decisions.orders(Action.CUT_LR).sum() == 1
        begins.append(first(decisions.orders(Action.ROLLBACK)))
    assert begins == sorted(set(begins)), "aggressive acts first, conservative last"


def test_default_only_says_that_data_may_be_other_and_pretraining_acts():
    """Loss and norm quadruple and slowly fall. `default` confirms before it rolls back."""
    assert [load(name).rollback.confirm for name in ("default", "pretraining")] == [True, False]
    _, losses, norms = healthy(steps=400)
    high = np.exp(-np.arange(200) / 300)
    losses[200:] += 6.0 * high
    norms[200:] *= 1 + 3 * high
    default, acting = (decisions_of(name, losses, norms) for name in ("default", "pretraining"))
    assert not default.skip.any()
    assert not default.orders(Action.CUT_LR | Action.STOP).any()
    assert default.orders(Action.ALERT).any()
    assert acting.skip.any()
    assert acting.orders(Action.CUT_LR).any()
    assert acting.orders(Action.ROLLBACK).any()
    assert not acting.orders(Action.STOP).any()


def test_default_warns_of_a_loss_that_blows_up_and_changes_no_finite_step():
    """Each step makes the next worse. The host decides about the rate."""
    _, losses, norms = healthy(steps=220)
    grown = 1.5 ** np.arange(20)
    losses[200:] += grown
    norms[200:] *= 1 + 10 * grown
    decisions = decisions_of("default", losses, norms)
    at = first(decisions.reports(Cause.LOSS_SPIKE))
    assert at is not None
    assert (at >= 200, decisions.action[at]) == (True, Action.ALERT)
    assert (decisions.lr_scale == decisions.grad_scale).all()
    assert (decisions.lr_scale == 1).all()
    assert not decisions.skip.any()
    assert not load("default").engine().cuts_lr
    assert load("default").engine().limits_lr


def test_observe_is_default_in_another_mode():
    differing = {d.key for d in diff(load("default"), load("observe"))}
    assert differing == {"name", "description", "references", "mode"}


FAULT_HEAD = 'schema = 1\nname = "x"\n[detect.nonfinite]\n'
ALL = "".join(
    f'[[respond]]\nto = ["{cause}"]\ndo = {list(words)}\n' for cause, (_, words) in FAULTS.items()
)
NUMBERS = "[budget]\nshrinks = 2\n[retry]\nbase_delay_s = 30\nmax_delay_s = 600\n"


def test_every_fault_and_every_answer_can_be_written_and_reaches_the_host():
    """Rules for the same fault add up, and the device sees none of them."""
    again = '[[respond]]\nto = ["oom"]\ndo = ["save"]\n'
    policy, without = loads(FAULT_HEAD + ALL + again + NUMBERS), loads(FAULT_HEAD)
    assert loads(dumps(policy)) == policy
    assert policy.config() == without.config()
    assert fingerprint(policy) == fingerprint(without)
    assert all(flag >= Cause.OOM for flag, _ in FAULTS.values())
    host = HostPolicy.of(policy)
    for flag, words in FAULTS.values():
        assert host.answers(flag) == set(words)
    assert (host.budget.shrinks, host.retry.base_delay_s, host.retry.max_delay_s) == (2, 30, 600)


def test_an_observing_policy_and_an_engine_answer_nothing():
    for host in (HostPolicy.of("default", {"mode": "observe"}), HostPolicy.of(EngineConfig())):
        assert not any(host.answers(flag) for flag, _ in FAULTS.values())
        assert host.retry == Retry()


PUBLISHED = {  # it saves for what it does not know, and for nothing else
    Cause.OOM: {"shrink_microbatch", "clear_cache"},
    Cause.DATA: {"skip_batch"},
    Cause.NETWORK: {"retry"},
    Cause.UNKNOWN: {"save"},
}


def test_the_presets_answer_all_faults():
    wanted = {cause: {*words, "save"} for cause, words in PUBLISHED.items()}
    for name in {*preset_names()} - {"zclip"}:
        assert load(name).fault_actions() == wanted | {Cause.HANG: {"alert"}}, name


@pytest.mark.parametrize("name", ["default", "aggressive", "conservative"])
def test_the_published_system_with_its_own_numbers(name):
    policy = load(f"self-healing-trl-{name}")
    assert policy.fault_actions() == PUBLISHED
    assert (policy.retry[:3], policy.budget.shrinks) == ((30, 2, 600), 3)
    assert policy.skip_batch == SkipBatch()
