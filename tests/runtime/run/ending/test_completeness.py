"""`incomplete_run_error`: what is missing in a run whose loop has ended by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from healcore.errors import IncompleteRun
from healcore.runtime.run.ending.completeness import incomplete_run_error
from healcore.runtime.run.progress import RunProgress


def error_of(
    *,
    step: int = 0,
    taken: int = 0,
    resumed_at: int | None = None,
    completed: bool = False,
    read: int = 0,
    was_used: bool = True,
    reached_end: bool = False,
    break_place: str = "",
    has_trainer: bool = False,
    repeated_all_passes: bool = False,
    framework: str = "torch",
) -> BaseException | None:
    """The error of a run of a policy that only observes, so that nothing stops it."""
    progress = RunProgress(step=step)
    if resumed_at is not None:
        progress.resume(resumed_at, completed=completed)
    progress.count(taken)
    state = SimpleNamespace(
        is_complete=False, was_used=was_used, reached_end=reached_end, break_place=break_place
    )
    run: Any = SimpleNamespace(
        progress=progress,
        loop=SimpleNamespace(state=state, has_trainer=has_trainer),
        driver=SimpleNamespace(framework=framework, no_step_reason=lambda: ""),
        step_batches=SimpleNamespace(pending_ids=[(0, n) for n in range(read)], skipped_steps=0),
        loaders=SimpleNamespace(has_repeated_all=repeated_all_passes),
        way_back=SimpleNamespace(repeat_from=lambda *, before: None),
        nonfinite_recovery=SimpleNamespace(stop_if_never_finite=lambda *, at_end: None),
        policy=SimpleNamespace(observes=True, rollback=SimpleNamespace(nonfinite_state="rollback")),
        journal=SimpleNamespace(not_taken=0),
    )
    return incomplete_run_error(run)


def test_a_run_that_has_taken_steps_is_complete():
    assert error_of(taken=5) is None


@pytest.mark.parametrize(
    ("framework", "advice"), [("torch", "optimizer.step()"), ("jax", "healer.update(")]
)
def test_steps_without_the_healer_are_an_error_that_names_the_loop_to_write(framework, advice):
    error = error_of(taken=5, was_used=False, framework=framework)
    assert isinstance(error, IncompleteRun)
    assert "took its steps without the Healer" in str(error)
    assert advice in str(error)


@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_new_run_without_a_step_is_an_error_that_counts_the_batches(read):
    batches = {0: "0 batches read", 1: "1 batch read", 3: "3 batches read"}[read]
    assert batches in str(error_of(read=read))


def test_a_resumed_run_that_reads_batches_without_a_step_is_an_error():
    assert "has seen no step" in str(error_of(resumed_at=10, read=2))


def test_a_resumed_run_whose_loop_reads_nothing_is_an_error():
    error = error_of(resumed_at=10)
    assert "was resumed at step 10, and the loop has ended without a step" in str(error)


@pytest.mark.parametrize(
    "at_its_end",
    [
        {"reached_end": True},
        {"completed": True},
        {"repeated_all_passes": True},
        {"break_place": "batch 3 of epoch 0"},
        {"has_trainer": True},
    ],
    ids=lambda case: next(iter(case)),
)
def test_a_resumed_run_without_a_step_is_complete_at_its_end(at_its_end):
    assert error_of(resumed_at=10, **at_its_end) is None
