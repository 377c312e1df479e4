"""The parts of an open run, which a Healer keeps private: for tests that look inside."""

from typing import Any

from healcore import Healer
from healcore.runtime.run.run import Run


def run_of(healer: Healer[Any]) -> Run:
    """The parts of a Healer's run, after the Healer has been entered."""
    return healer._run
