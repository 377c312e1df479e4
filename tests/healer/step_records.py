"""A step record in which a test replaces some fields."""

from typing import Any

from healcore.core.engine.state import init, record_numbers
from healcore.core.step_record import StepRecord, host_record
from healcore.policy import load


def record(**changes: Any) -> StepRecord:
    """An ordinary step of the engine `model`, with these fields replaced."""
    state = init(load("default").engine().config)
    return host_record(record_numbers(state), "model")._replace(**changes)
