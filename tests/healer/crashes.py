"""Simulates, within one process, a process that is killed at a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from healcore.runtime.loop.end import release


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
