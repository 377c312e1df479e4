"""A step record in which a test replaces some fields."""

from typing import Any

from healcore.core import step_record
from healcore.core.engine.state import init
from healcore.core.step_record import StepRecord
from healcore.policy import load


def record(**changes: Any) -> StepRecord:
    """An ordinary step of the engine `model`, with these fields replaced."""
    state = init(load("default").engine().config)
    return step_record.to_host(step_record.numbers(state), "model")._replace(**changes)
