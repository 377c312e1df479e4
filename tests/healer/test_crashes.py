"""A crash at any point of a rollback: the run comes to the same end, bit for bit.

The points are found by counting: every call that changes something on disk or in the live run is
one. The test with SIGKILL at random moments is test_killed.py; here each point has its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.loop.end import release
from healcore.runtime.loop.saver import Saver
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.store import CheckpointStore, files
from tests.healer.training_loops import Faults, loop_of, rules, same, train

POINTS = [
    (CheckpointStore, "restore"),
    (Restorer, "_load_state"),
    (LoaderRegistry, "rewind"),
    (Saver, "begin_attempt"),
    (CheckpointStore, "commit"),
    (files, "replace"),
    (Saver, "report_failures"),
]
BAD = [23, 26]


class Crash(BaseException):
    """Stands for the kill: not caught, and no cleanup runs after it; see `crashing`."""


def end_without_log(run: Any, error: BaseException | None) -> None:
    """Ends a run as its process's death does, without a word in its log."""
    run.saver.wait()
    run.ranks.termination.stop()
    run.driver.close()
    release(run)
    assert error is None or isinstance(error, Crash)


def crash(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    when: Callable[..., bool],
    run: Callable[[], Any],
) -> None:
    """Runs something up to a call, and no further: as if the process were killed there."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise Crash
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        patch.setattr("healcore.runtime.healer.close", end_without_log)
        with pytest.raises(Crash):
            run()


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, at: int | None) -> Iterator[list[str]]:
    """Raises Crash before the `at`-th point within a rollback; counts them with None."""
    passed: list[str] = []
    inside = False
    roll_back = Restorer.roll_back

    def watched(self: Any, order: Any) -> Any:
        nonlocal inside
        inside = True
        result = roll_back(self, order)
        inside = False
        return result

    def counted(kind: Any, name: str) -> Any:
        method = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                if len(passed) == at:
                    inside = False
                    raise Crash(f"{kind.__name__}.{name}")
                passed.append(f"{kind.__name__}.{name}")
            return method(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Restorer, "roll_back", watched)
        for kind, name in POINTS:
            patch.setattr(kind, name, counted(kind, name))
        # A killed process logs nothing at its end.
        patch.setattr("healcore.runtime.healer.close", end_without_log)
        yield passed


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_point_of_a_rollback(framework, tmp_path, monkeypatch):
    with crashing(monkeypatch, None) as passed:
        clean = loop_of(framework, Faults(always=BAD), rules())
        expected = train(clean, rules(), range(40), store=tmp_path / "clean")
    assert expected["rollbacks"] == 2
    first = len(passed) // 2
    assert passed[:first] == passed[first:]
    assert len({*passed}) == len(POINTS)
    for at in range(0, first, 1 if framework == "torch" else 3):
        folder = tmp_path / str(at)
        with crashing(monkeypatch, at), pytest.raises(Crash):
            train(loop_of(framework, Faults(always=BAD), rules()), rules(), range(40), store=folder)
        after = loop_of(framework, Faults(always=BAD), rules())
        facts = train(after, rules(), range(40), store=folder)
        assert facts["step"] == expected["step"], passed[at]
        assert facts["rollbacks"] == expected["rollbacks"], passed[at]
        assert same(after.weights(), clean.weights()), passed[at]
