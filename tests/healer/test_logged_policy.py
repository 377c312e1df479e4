"""The event `start` has the policy of the run, with the values that the program replaces."""

from healcore import policy as policies
from tests.healer.run_directory import events
from tests.healer.training_loops import BOTH_FRAMEWORKS, SKIPS, loop_of, train


@BOTH_FRAMEWORKS
def test_a_run_writes_down_the_policy_with_its_values_replaced(framework, tmp_path):
    replaced = {"rollback": {"probation": 3}, "max_skips": 2}
    policy = policies.load(SKIPS, **replaced)
    train(loop_of(framework, policy=policy), SKIPS, range(4), store=tmp_path, **replaced)
    (start,) = events(tmp_path, "start")
    assert policies.loads(start["policy_toml"]) == policy
    assert start["fingerprint"] == policies.fingerprint(policy) != policies.fingerprint(SKIPS)
