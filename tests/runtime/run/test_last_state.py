"""What the last save of a run may hold, by the table in the docstring of `LastState`."""

from types import SimpleNamespace
from typing import Any

import pytest

from healcore.errors import EndRequested, RunStopped, Terminated
from healcore.runtime.run.ending.shutdown import LastState, Shutdown

STOPPED = RunStopped("diagnosis", "why", None)
STOP_FILE = EndRequested("the stop file")
SIGNAL = Terminated(15)


@pytest.mark.parametrize(
    ("error", "place", "exact", "state"),
    [
        (None, "between", True, LastState.COMPLETE),
        (None, "batches read", False, LastState.COMPLETE),
        (ValueError(), "within step", True, LastState.UNUSABLE),
        (STOP_FILE, "within step", True, LastState.UNUSABLE),
        (SIGNAL, "trainer work", True, LastState.UNUSABLE),
        (STOPPED, "between", True, LastState.UNUSABLE),
        (SIGNAL, "between", False, LastState.COMPLETE),
        (ValueError(), "between", True, LastState.COMPLETE),
        (STOP_FILE, "batches read", True, LastState.BEFORE_BATCHES),
        (STOP_FILE, "batches read", False, LastState.UNUSABLE),
        (SIGNAL, "batches read", True, LastState.UNUSABLE),
        (ValueError(), "batches read", True, LastState.UNUSABLE),
    ],
)
def test_the_state_of_an_end(error, place, exact, state):
    signals = SimpleNamespace(signal_number=None)
    run: Any = SimpleNamespace(
        driver=SimpleNamespace(
            pending_steps=lambda: 0, is_interrupted=lambda: place == "within step"
        ),
        end_requests=SimpleNamespace(stop_signals=signals),
        loop=SimpleNamespace(has_unfinished_work=place == "trainer work"),
        saver=SimpleNamespace(resumes_exactly=exact),
        step_batches=SimpleNamespace(between_steps=place == "between"),
    )
    assert Shutdown(run, error)._last_state() is state
