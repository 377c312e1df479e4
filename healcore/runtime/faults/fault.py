"""What an exception means for the run."""

from __future__ import annotations

from typing import NamedTuple

from healcore.core.verdict import Cause
from healcore.runtime.faults.failures import FAILURES, Failure


class Fault(NamedTuple):
    """An exception, classified."""

    cause: Cause
    """OOM, DATA, NETWORK, HANG or UNKNOWN."""
    sign: str
    """What it was recognised by: a type, an HTTP status, an errno, a status code."""
    transient: bool = False
    """The same call may succeed when it is made again. Only ever for NETWORK."""
    retry_after_s: float | None = None
    """Seconds that the server asks to wait; None: it does not say."""

    @property
    def failure(self) -> Failure:
        """Diagnosis, severity and recipe."""
        return FAILURES[self.cause]
