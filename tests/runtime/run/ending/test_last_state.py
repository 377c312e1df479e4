"""What the last save of a run may hold, by the table in the docstring of `LastState`."""

import pytest

from healcore.events.models import Ending
from healcore.runtime.run.ending.last_state import LastState, last_state

ENDINGS = {
    "no error": Ending.COMPLETED,
    "an exception": Ending.EXCEPTION,
    "stopped": Ending.STOPPED,
    "stop file": Ending.REQUESTED,
    "signal": Ending.SIGNAL,
}


@pytest.mark.parametrize(
    ("why", "place", "resumes_exactly", "state"),
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
def test_the_last_save_holds_what_the_place_of_the_end_allows(why, place, resumes_exactly, state):
    found = last_state(
        completed=why == "no error",
        has_begun_step=place == "within step",
        has_unfinished_work=place == "trainer work",
        between_steps=place == "between steps",
        ending=ENDINGS[why],
        by_stop_file=why == "stop file",
        resumes_exactly=resumes_exactly,
    )
    assert found is state
