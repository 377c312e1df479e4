"""A process dies at any point of a rollback, and the next one ends the run as without the death."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from healcore import CheckpointStore
from healcore.runtime.data.sources import Sources
from healcore.runtime.run.checkpoints.saver import Saver
from healcore.runtime.run.restore.way_back import WayBack
from healcore.runtime.store import files
from tests.healer.simulated_kills import Crash, die_at_the_end
from tests.healer.training_loops import Faults, TrainingResult, loop_of, rules, same, train

POINTS = [
    (CheckpointStore, "restore"),
    (CheckpointStore, "replace_record"),
    (Saver, "begin_attempt"),
    (Saver, "report_failures"),
    (WayBack, "_continue_from"),
    (Sources, "seek"),
    (files, "replace"),
]
"""Functions that change the run or its directory within a rollback."""


class RollbackPoints:
    """Notes the calls of `POINTS` within rollbacks, and may raise `Crash` before one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, *, crash_at: int | None = None) -> None:
        self.passed: list[str] = []
        """Names of the functions that were called."""
        self._crash_at = crash_at
        self._is_inside = False
        for owner, name in POINTS:
            patch.setattr(owner, name, self._noted(getattr(owner, name)))
        patch.setattr(WayBack, "roll_back", self._entered(WayBack.roll_back))

    def _entered(self, restore: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(restore)
        def entered(*args: Any) -> Any:
            self._is_inside = True
            result = restore(*args)
            self._is_inside = False
            return result

        return entered

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                if len(self.passed) == self._crash_at:
                    self._is_inside = False
                    raise Crash(function.__qualname__)
                self.passed.append(function.__qualname__)
            return function(*args, **kwargs)

        return noted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "distance"),
    [("torch", 1), ("jax", 3)],
    ids=["torch", "jax"],
)
def test_a_kill_at_any_point_of_a_rollback_changes_nothing(
    framework, distance, tmp_path, monkeypatch
):
    """`distance` is from one tried point to the next one."""

    def run(folder: str) -> tuple[TrainingResult, list[Any]]:
        loop = loop_of(framework, Faults(always=[23, 26]), rules())
        result = train(loop, rules(), range(40), store=tmp_path / folder)
        return result, loop.weights()

    # A run without a kill has two rollbacks, which pass the same points.
    with monkeypatch.context() as patch:
        passed = RollbackPoints(patch).passed
        expected, weights = run("clean")
    assert expected.rollbacks == 2
    of_first = passed[: len(passed) // 2]
    assert passed == of_first * 2
    assert len({*of_first}) == len(POINTS)

    for number, point in enumerate(of_first):
        if number % distance:
            continue
        # The first rollback is interrupted.
        folder = str(number)
        with monkeypatch.context() as patch:
            RollbackPoints(patch, crash_at=number)
            die_at_the_end(patch)
            with pytest.raises(Crash):
                run(folder)
        # The next process ends the run.
        result, after = run(folder)
        assert result == expected, point
        assert same(after, weights), point
