"""A policy that only observes: the same events, and the training of a loop without a Healer."""

from tests.healer.run_directory import events
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, same, train


@BOTH_FRAMEWORKS
def test_observe_changes_nothing_and_logs_the_same(framework, tmp_path):
    plain = loop_of(framework, Faults(always=[5, 23]))
    policy = rules(mode="observe")
    for number in range(30):
        plain.step(None, number)
    watched = loop_of(framework, Faults(always=[5, 23]), policy)
    result = train(watched, policy, range(30), store=tmp_path)
    assert result.rollbacks == 0
    assert same(watched.weights(), plain.weights())
    alarms = events(tmp_path, "alarm")
    assert all(alarm["observed"] for alarm in alarms)
    assert any("ROLLBACK" in alarm["action"] for alarm in alarms)
    assert events(tmp_path, "rollback") == []
