"""What the last save of a run may hold, by the table in the docstring of `LastState`."""

from types import SimpleNamespace
from typing import Any

import pytest

from healcore.errors import EndRequested, RunStopped, Terminated
from healcore.runtime.run.ending.shutdown import LastState, Shutdown
from tests.runtime.run.bare_driver import BareDriver

ERRORS = {
    "no error": None,
    "an exception": ValueError(),
    "stopped": RunStopped("diagnosis", "why", None),
    "stop file": EndRequested("the stop file"),
    "signal": Terminated(15),
}


class EndedDriver(BareDriver):
    def __init__(self, *, is_within_step: bool) -> None:
        self.is_within_step = is_within_step

    def is_interrupted(self) -> bool:
        return self.is_within_step


def run_at(place: str, *, resumes_exactly: bool) -> Any:
    """A run that ends at a place of its loop."""
    state = SimpleNamespace(has_unfinished_work=place == "trainer work")
    return SimpleNamespace(
        driver=EndedDriver(is_within_step=place == "within step"),
        end_requests=SimpleNamespace(stop_signals=SimpleNamespace(signal_number=None)),
        loop=SimpleNamespace(state=state),
        saver=SimpleNamespace(resumes_exactly=resumes_exactly),
        step_batches=SimpleNamespace(between_steps=place == "between steps"),
    )


@pytest.mark.parametrize(
    ("error", "place", "resumes_exactly", "state"),
    [
        ("no error", "between steps", True, LastState.COMPLETE),
        ("no error", "batches read", False, LastState.COMPLETE),
        ("an exception", "within step", True, LastState.UNUSABLE),
        ("stop file", "within step", True, LastState.UNUSABLE),
        ("signal", "trainer work", True, LastState.UNUSABLE),
        ("stopped", "between steps", True, LastState.UNUSABLE),
        ("signal", "between steps", False, LastState.COMPLETE),
        ("an exception", "between steps", True, LastState.COMPLETE),
        ("stop file", "batches read", True, LastState.BEFORE_BATCHES),
        ("stop file", "batches read", False, LastState.UNUSABLE),
        ("signal", "batches read", True, LastState.UNUSABLE),
        ("an exception", "batches read", True, LastState.UNUSABLE),
    ],
)
def test_the_last_save_holds_what_the_place_of_the_end_allows(error, place, resumes_exactly, state):
    run = run_at(place, resumes_exactly=resumes_exactly)
    assert Shutdown(run, ERRORS[error])._last_state() is state
