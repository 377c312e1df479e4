"""The state of a loop follows the table in the docstring of `LoopState`."""

import ast
from pathlib import Path

import pytest
import torch

import healcore
from healcore.errors import AlreadyCompleted
from healcore.runtime.data.sources import Sources
from healcore.runtime.run.loop_state import LoopPhase, LoopState
from healcore.runtime.run.progress import RunProgress
from healcore.runtime.trainer_access import trainer_access_of
from tests.healer.run_directory import new_process
from tests.open_run import run_of

RUNTIME = Path(healcore.__file__).parent / "runtime"


def loop_state(*, has_trainer=False, step=0):
    return LoopState(Sources(), RunProgress(step=step), has_trainer=has_trainer)


def facts(state):
    """The attributes that others may read."""
    return {name: value for name, value in vars(state).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    ("phase", "event", "new_phase"),
    [
        ("BEFORE_STEP", "find_completed", "COMPLETED"),
        ("BEFORE_STEP", "resume_in_body", "AFTER_STEP"),
        ("BEFORE_STEP", "count_step", "AFTER_STEP"),
        ("BEFORE_STEP", "end_step", "BEFORE_STEP"),
        ("BEFORE_STEP", "mark_step_unfinished", "EPOCH_END"),
        ("AFTER_STEP", "count_step", "AFTER_STEP"),
        ("AFTER_STEP", "end_step", "BEFORE_STEP"),
        ("AFTER_STEP", "mark_step_unfinished", "AFTER_STEP"),
        ("EPOCH_END", "count_step", "AFTER_STEP"),
        ("EPOCH_END", "end_step", "BEFORE_STEP"),
        ("EPOCH_END", "mark_step_unfinished", "EPOCH_END"),
        ("COMPLETED", "end_step", "COMPLETED"),
        ("COMPLETED", "mark_step_unfinished", "COMPLETED"),
    ],
)
def test_an_event_leads_from_a_phase_to_the_next(phase, event, new_phase):
    state = loop_state()
    state.phase = LoopPhase[phase]
    before = facts(state)
    getattr(state, event)()
    assert facts(state) == {**before, "phase": LoopPhase[new_phase]}


@pytest.mark.parametrize(
    ("event", "given", "changed"),
    [
        ("note_use", {}, {"was_used": True}),
        ("enter_body", {}, {"in_body": True}),
        ("reach_end", {}, {"reached_end": True}),
        ("count_steps_as_epochs", {}, {"step_is_epoch": True}),
        ("set_batch_size_search", {"searches": True}, {"searches_batch_size": True}),
        ("yield_step", {"step": 3}, {"yielded_step": 3, "in_body": True}),
        ("begin_evaluation", {}, {"in_evaluation": True, "body_continues": True}),
        ("continue_body", {}, {"body_continues": True}),
        ("reject_own_count", {"obstacle": "a"}, {"own_count_obstacle": "a"}),
    ],
)
def test_an_event_changes_what_it_is_named_after_and_nothing_else(event, given, changed):
    state = loop_state()
    before = facts(state)
    getattr(state, event)(**given)
    assert facts(state) == {**before, **changed}


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ("enter_body", "leave_body"),
    ],
)
def test_an_event_ends_what_another_has_begun(begins, ends):
    state = loop_state()
    before = facts(state)
    getattr(state, begins)()
    getattr(state, ends)()
    assert facts(state) == before


def test_the_body_of_a_yielded_step_ends():
    state = loop_state()
    before = facts(state)
    state.yield_step(2)
    state.end_yielded_step()
    assert facts(state) == before


def test_a_body_that_ends_returns_to_the_body_of_the_outer_loop():
    state = loop_state()
    assert not state.enter_body()
    assert state.left_early
    assert state.enter_body(), "in the body of the outer loop"
    state.leave_body(in_outer_body=True)
    assert state.in_body
    state.leave_body()
    assert not state.in_body
    assert not state.left_early


def test_a_step_ends_an_evaluation_and_its_end_ends_the_mark_of_the_body():
    state = loop_state()
    state.begin_evaluation()
    state.end_step()
    assert state.body_continues, "without a step the same body may continue"
    state.count_step()
    assert not state.in_evaluation
    assert state.body_continues
    state.end_step()
    assert not state.body_continues


def test_an_evaluation_or_the_code_of_a_trainer_after_a_step_is_unfinished_work():
    state = loop_state()
    state.count_step()
    assert not state.has_unfinished_work
    state.begin_evaluation()
    assert state.has_unfinished_work
    state.end_evaluation()
    assert not state.has_unfinished_work
    state = loop_state(has_trainer=True)
    assert not state.has_unfinished_work
    state.count_step()
    assert state.has_unfinished_work


def test_a_yielded_step_is_taken_once_the_run_has_counted_it():
    state = loop_state(step=4)
    assert not state.has_taken_yielded_step
    state.yield_step(4)
    assert not state.has_taken_yielded_step
    state.yield_step(3)
    assert state.has_taken_yielded_step


def assigned_by_others(tree: ast.AST, names: set[str]) -> list[str]:
    """The assignments to attributes of another object than `self` with one of these names."""
    targets = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    targets = [node for node in targets if isinstance(node.ctx, ast.Store) and node.attr in names]
    return [ast.unparse(node) for node in targets if ast.unparse(node.value) != "self"]


def test_nobody_else_assigns_the_state():
    names = set(facts(loop_state()))
    assert assigned_by_others(ast.parse("run.loop.state.in_body = True"), names)
    for path in RUNTIME.rglob("*.py"):
        assert assigned_by_others(ast.parse(path.read_text()), names) == [], path


def opened(store=None):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    healer = healcore.Healer("default", state={"model": model, "sgd": optimizer}, store=store)
    return model, optimizer, healer


def train(model, optimizer, healer):
    loss = model(torch.ones(4, 2)).mean()
    healer.observe(loss)
    loss.backward()
    optimizer.step()


def test_a_step_is_counted_in_the_body_and_dealt_with_after_it():
    model, optimizer, healer = opened()
    with healer:
        loop = run_of(healer).loop
        state = loop.state
        assert state.phase is LoopPhase.BEFORE_STEP
        for _ in healer.batches([torch.ones(4, 2)] * 3):
            assert state.phase is LoopPhase.BEFORE_STEP
            train(model, optimizer, healer)
            loop.queue_dispatch()
            assert state.phase is LoopPhase.AFTER_STEP
            # Of a program: the state is saved after an exception.
            assert not state.has_unfinished_work
        assert state.phase is LoopPhase.BEFORE_STEP


def test_the_code_of_a_trainer_after_an_epoch_is_a_phase():
    model, optimizer, healer = opened()
    with healer:
        loop = run_of(healer).loop
        state = loop.state
        for step in healer.steps(2):
            train(model, optimizer, healer)
            if step == 0:
                trainer_access_of(healer).mark_step_unfinished()
                assert state.phase is LoopPhase.EPOCH_END
                assert state.has_unfinished_work
                loop.queue_dispatch()
                assert state.phase is LoopPhase.AFTER_STEP
                trainer_access_of(healer).mark_step_unfinished()
                assert state.phase is LoopPhase.AFTER_STEP, "a counted step is not forgotten"
        trainer_access_of(healer).mark_step_unfinished()
        assert state.phase is LoopPhase.EPOCH_END
        healer.after_step()
        assert state.phase is LoopPhase.BEFORE_STEP


def test_a_completed_run_stays_completed(tmp_path):
    torch.manual_seed(0)
    model, optimizer, healer = opened(tmp_path)
    with healer:
        for _ in healer.steps(2):
            train(model, optimizer, healer)
    new_process()
    torch.manual_seed(0)
    model, optimizer, healer = opened(tmp_path)
    with healer:
        state = run_of(healer).loop.state
        assert list(healer.steps(2)) == []
        healer.after_step()
        assert state.phase is LoopPhase.COMPLETED
        train(model, optimizer, healer)
        with pytest.raises(AlreadyCompleted):
            healer.after_step()
        assert state.phase is LoopPhase.COMPLETED
