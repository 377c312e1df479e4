"""The host's part of a policy: kept and checked, and not in the engine."""

from __future__ import annotations

import pytest

from healcore.policy import PolicyError, dumps, load, loads

# The example file of the design, with every section of schema 1.
WHOLE = """
schema = 1
name = "whole"
references = ["arXiv:2504.02507"]
mode = "heal"

[clip]
kind = "zclip"
z_threshold = 2.5
ema_decay = 0.97
warmup_steps = 25
target = "reciprocal"
max_norm = 1.0

[detect.nonfinite]
[detect.loss_spike]
[detect.grad_spike]
[detect.divergence]
[detect.plateau]

[[respond]]
to = ["nonfinite"]
do = ["skip"]
[[respond]]
to = ["nonfinite"]
when = { consecutive = 3 }
do = ["rollback", "cut_lr"]
[[respond]]
to = ["oom"]
do = ["shrink_microbatch", "clear_cache"]

[rollback]
depth = 1
deepen = 1
probation = 50
skip_batches = 20
confirm = true
[lr]
factor = 0.5
floor = 0.1
hold_steps = 100
ramp_steps = 200
[budget]
recoveries = 3
lr_cuts = 4
shrinks = 2
refund_after = 1000
[retry]
base_delay_s = 30
factor = 2
max_delay_s = 600
jitter = 0.1
"""


def test_a_whole_file_loads_and_round_trips():
    policy = loads(WHOLE)
    assert policy.rollback.probation == 50
    assert policy.rollback.confirm
    assert policy.retry.max_delay_s == 600
    assert loads(dumps(policy)) == policy


def test_the_engine_has_only_the_rules_of_the_device():
    policy = loads(WHOLE)
    assert [rule.to for rule in policy.respond if rule.for_host] == [("oom",)]
    assert len(policy.engine().config.rules) == 2


@pytest.mark.parametrize(
    ("rule", "key", "said"),
    [
        ('to = ["oom", "nonfinite"]\ndo = ["alert"]', "to[1]", "one rule for each kind"),
        ('to = ["nonfinite"]\ndo = ["clear_cache"]', "do[0]", "the host's own causes"),
        ('to = ["oom"]\ndo = ["skip"]', "do[0]", "happens within a step"),
    ],
)
def test_a_rule_is_for_one_of_the_two(rule, key, said):
    with pytest.raises(PolicyError) as caught:
        loads(f'schema = 1\nname = "x"\n[detect.nonfinite]\n[[respond]]\n{rule}\n')
    assert key in str(caught.value)
    assert said in str(caught.value)


def test_retry_cannot_end_before_it_begins():
    with pytest.raises(PolicyError, match="base_delay_s"):
        loads('schema = 1\nname = "x"\n[retry]\nbase_delay_s = 60\nmax_delay_s = 30\n')


def test_presets_still_load():
    for name in ("default", "pretraining", "aggressive", "conservative", "observe", "zclip"):
        assert load(name).engine()
