"""A kill without a process of its own: the run ends as if its process had died."""

from typing import Any

import pytest

from healcore.events.models import Ending
from healcore.runtime import healer as healer_module
from healcore.runtime.run.ending.exits import RunEnd
from healcore.runtime.run.run import Run


class Crash(BaseException):
    """Stands for the kill. Nothing catches it, and no cleanup follows; see `end_without_log`."""


def die_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Puts `end_without_log` in the place of `end_run`, which would save the last state."""
    patch.setattr(healer_module, "end_run", end_without_log)


def end_without_log(run: Run, error: BaseException | None, **_: Any) -> RunEnd:
    """Ends a run as its process's death does, without a word in its log."""
    run.saver.wait()
    run.end_requests.stop_watching()
    run.driver.close()
    (claim,) = run.claims
    claim.release()
    assert error is None or isinstance(error, Crash)
    return RunEnd(Ending.EXCEPTION, error)
