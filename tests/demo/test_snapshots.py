"""Which copies are known to be good."""

from __future__ import annotations

from healcore.demo.snapshots import Snapshots


def _run(snapshots: Snapshots[str], steps: range, alarms: tuple[int, ...] = ()) -> None:
    for step in steps:
        if snapshots.due(step):
            snapshots.add(step, f"before {step}")
        snapshots.observe(step, calm=step not in alarms)


def test_a_copy_is_good_after_calm_steps():
    snapshots: Snapshots[str] = Snapshots(every=5, probation=10)
    _run(snapshots, range(9))
    assert snapshots.go_back(1) is None
    snapshots = Snapshots(every=5, probation=10)
    _run(snapshots, range(10))
    assert snapshots.go_back(1) == (0, "before 0")


def test_an_alarm_ends_the_hopes_of_what_was_taken_before_it():
    snapshots: Snapshots[str] = Snapshots(every=5, probation=10)
    _run(snapshots, range(30), alarms=(17,))  # 10 and 15 are candidates then, 5 is good
    assert snapshots.go_back(1) == (20, "before 20")
    assert snapshots.go_back(2) == (5, "before 5")


def test_going_back_forgets_the_branch_given_up():
    snapshots: Snapshots[str] = Snapshots(every=5, probation=10)
    _run(snapshots, range(40))
    assert snapshots.go_back(2) == (25, "before 25")
    assert snapshots.go_back(1) == (25, "before 25")


def test_deeper_than_there_is_goes_to_the_oldest_kept():
    snapshots: Snapshots[str] = Snapshots(every=5, probation=10, keep=3)
    _run(snapshots, range(60))
    assert snapshots.go_back(99) == (40, "before 40")
