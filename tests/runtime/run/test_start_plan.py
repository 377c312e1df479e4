"""What a start does with the run in the store, as a function of values."""

import re
from typing import Any

import pytest

from healcore.runtime.program_settings import WEIGHTS
from healcore.runtime.run.process_runs import forget_runs, has_completed_run, remember_run
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.start_plan import StartPlan, StoreNotEmpty, decide_start
from healcore.runtime.store.checkpoints import CheckpointInfo, Status

NEW, LOADED = StartPlan.NEW, StartPlan.NEW_FROM_LOADED_WEIGHTS
RESUME, COMPLETED = StartPlan.RESUME, StartPlan.COMPLETED
OTHER_WEIGHTS = {WEIGHTS: "a -> b"}
OTHER_RATE = {"learning_rate": "0.1 -> 0.2"}
RUNNING, ENDED = RunRecord(step=4), RunRecord(step=4, completed=True)
NO_STEPS = RunRecord(completed=True)


def saved(step: int, status: Status = "candidate") -> CheckpointInfo:
    return CheckpointInfo(step, status, 0, 0.0, 1, "runs/a")


FIRST, BOTH = [saved(0)], [saved(0), saved(4)]


def decide(resume, saves, newest, changes=None, *, has_trainer=False, completed_here=False):
    return decide_start(
        resume,
        place="runs/a",
        saves=saves,
        newest=newest,
        changes=changes or {},
        has_trainer=has_trainer,
        completed_here=completed_here,
    )


@pytest.mark.parametrize(
    ("resume", "saves", "newest", "given", "plan"),
    [
        # The store is empty.
        ("auto", [], None, {}, NEW),
        (True, [], None, {}, NEW),
        (False, [], None, {}, NEW),
        (False, [], ENDED, {"completed_here": True}, NEW),
        # The run in the store has not completed.
        ("auto", BOTH, RUNNING, {}, RESUME),
        (True, BOTH, RUNNING, {}, RESUME),
        ("auto", BOTH, RUNNING, {"changes": OTHER_RATE}, RESUME),
        ("auto", BOTH, RUNNING, {"changes": OTHER_WEIGHTS}, RESUME),
        ("auto", BOTH, RUNNING, {"completed_here": True}, RESUME),
        ("auto", BOTH, None, {}, RESUME),
        ("auto", FIRST, None, {"changes": OTHER_WEIGHTS}, RESUME),
        # The store has the first snapshot only.
        ("auto", FIRST, RunRecord(), {}, RESUME),
        ("auto", FIRST, RunRecord(), {"changes": OTHER_RATE}, RESUME),
        ("auto", FIRST, RunRecord(), {"changes": OTHER_WEIGHTS}, LOADED),
        (True, FIRST, RunRecord(), {"changes": OTHER_WEIGHTS}, LOADED),
        (True, FIRST, NO_STEPS, {"changes": OTHER_WEIGHTS}, LOADED),
        # The run in the store has completed.
        ("auto", BOTH, ENDED, {}, COMPLETED),
        ("auto", FIRST, NO_STEPS, {}, COMPLETED),
        ("auto", BOTH, ENDED, {"has_trainer": True}, RESUME),
        (True, BOTH, ENDED, {}, RESUME),
        (True, BOTH, ENDED, {"changes": OTHER_RATE}, RESUME),
        (True, BOTH, ENDED, {"completed_here": True}, RESUME),
    ],
)
def test_a_start_is_decided_by_the_run_in_the_store(
    resume: Any, saves: Any, newest: Any, given: Any, plan: StartPlan
):
    assert decide(resume, saves, newest, **given) is plan


@pytest.mark.parametrize(
    ("resume", "newest", "given", "message"),
    [
        (False, RUNNING, {}, "earlier run, up to step 4: pass an empty directory"),
        (False, None, {}, "earlier run, up to step 4: pass an empty directory"),
        (False, ENDED, {"has_trainer": True}, "up to step 4"),
        ("auto", ENDED, {"completed_here": True}, "a run that this process has completed"),
        ("auto", ENDED, {"changes": OTHER_RATE}, "learning_rate: 0.1 -> 0.2"),
        ("auto", ENDED, {"changes": OTHER_WEIGHTS}, "began with other weights"),
        ("auto", ENDED, {"changes": OTHER_RATE, "has_trainer": True}, "Its last step is 4"),
    ],
)
def test_a_start_that_would_take_another_run_for_its_own_raises(
    resume: Any, newest: Any, given: Any, message: str
):
    with pytest.raises(StoreNotEmpty, match=f"^runs/a holds .*{re.escape(message)}"):
        decide(resume, BOTH, newest, **given)


def test_a_message_names_the_newest_step_that_was_not_abandoned():
    with pytest.raises(StoreNotEmpty, match="up to step 4:"):
        decide(False, [*BOTH, saved(9, "abandoned")], RUNNING)


def test_only_two_plans_load_a_checkpoint():
    assert [plan for plan in StartPlan if plan.resumes] == [RESUME, COMPLETED]


def test_a_process_remembers_the_runs_that_it_has_completed(tmp_path):
    record = RunRecord()
    assert not has_completed_run(tmp_path)
    remember_run(tmp_path, record)
    assert not has_completed_run(tmp_path)
    record.completed = True
    assert has_completed_run(tmp_path / "." / "x" / "..")
    assert not has_completed_run(tmp_path / "x")
    forget_runs()
    assert not has_completed_run(tmp_path)
