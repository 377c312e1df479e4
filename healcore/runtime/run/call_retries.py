"""The retries of a call under a run's policy: a read of a batch, a part of it, a user's call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from healcore.runtime.faults.retry import CallAttempt, Retries

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def retries_of(run: Run, name: str) -> Retries:
    """The retries of a call under the run's policy.

    Args:
        run: the parts of the run.
        name: what the call does, for the log.

    Returns:
        The retries. They log each attempt, and a signal ends their waits.
    """
    return Retries(name, run.policy, partial(_report_attempt, run), partial(_wait, run))


def _wait(run: Run, seconds: float) -> None:
    """Waits for the next attempt at a call, which is no hang, unless a signal ends the wait."""
    with run.hang_guard.excluding_wait():
        run.end_requests.sleep(seconds)


def _report_attempt(run: Run, attempt: CallAttempt) -> None:
    """Logs an attempt that has failed, or the success after failures."""
    line, number, fault, wait = attempt
    step = run.progress.step
    if fault is None:
        run.log.event("retried", step=step, attempt=number, why=line)
        run.log.info(line)
        return
    answer = None if wait is None else "retry"
    run.log.fault(step, fault, line, answer=answer, attempt=number, wait_s=wait)
