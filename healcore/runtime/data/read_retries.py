"""`ReadRetries`: repeats the read of a batch, as the policy's `[retry]` says."""

from __future__ import annotations

from typing import Protocol


class ReadRetries(Protocol):
    """The attempts to read a batch after failures in the network.

    `healcore.runtime.faults.retry.Retries` implements it with the policy's `[retry]`. The data
    layer knows only these two methods.
    """

    def wait_after(self, error: BaseException) -> bool:
        """Waits after a failed attempt.

        Args:
            error: the exception of the attempt.

        Returns:
            Whether to read again. False for an exception that is not a failure in the network, and
            after the last attempt.
        """
        ...

    def report_success(self) -> None:
        """Reports a success. After failures, the run's log gets a line."""
        ...
