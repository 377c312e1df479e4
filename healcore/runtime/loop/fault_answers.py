"""What a run does about faults: repeats network calls, leaves out unreadable batches.

With several ranks the batch before an unreadable one comes again in its place. All ranks then have
equally many batches: one that is short of one would end its epoch while the others wait for it, and
no rank can know what another one could not read before the step that needs it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from healcore.core.verdict import Cause, names
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.faults import Fault, classify
from healcore.runtime.faults.retry import Attempt, repeated
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.termination import TerminationWatch
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class FaultAnswers:
    """Carries out the policy's rules for faults, and logs each fault."""

    policy: HostPolicy
    loaders: LoaderRegistry
    ranks: Ranks
    termination: TerminationWatch
    log: RunLog
    step: Callable[[], int]
    """The step that the run is at, for the events."""

    def __post_init__(self) -> None:
        self._reads = 0
        self._unreadable: deque[int] = deque()
        """Numbers of the reads that failed, among the last `within`."""
        self._in_a_row = 0
        self._last: dict[int, Any] = {}
        """Number of a loader -> its last batch, with several ranks."""
        self._failed: dict[int, Exception] = {}
        """Number of a loader -> what reading the batch has raised that was replaced."""

    # -- network --------------------------------------------------------------------------------

    def retrying(self, call: Callable[P, T]) -> Callable[P, T]:
        """See `Healer.retrying`."""
        answers = "retry" in self.policy.answers(Cause.NETWORK)
        return repeated(
            call,
            self.policy.retry if answers else None,
            report=self._report_attempt,
            sleep=self.termination.sleep,
        )

    def _report_attempt(self, attempt: Attempt) -> None:
        if attempt.error is None or attempt.fault is None:
            self.log.event("retried", step=self.step(), attempt=attempt.number, why=str(attempt))
            self.log.info(str(attempt))
            return
        again = attempt.wait_s is not None
        self.report(
            attempt.fault,
            str(attempt),
            answer="retry" if again else None,
            attempt=attempt.number,
            wait_s=attempt.wait_s,
        )

    # -- data -----------------------------------------------------------------------------------

    def next_batch(self, number: int) -> tuple[Any, BatchId]:
        """The next batch of a loader that can be read, and its id; StopIteration after the last."""
        failed = self._failed.pop(number, None)
        while True:
            self._reads += 1
            try:
                found = self.loaders.next(number, after=failed)
            except Exception as error:
                ends = isinstance(error, StopIteration) or error is failed
                if ends or not self._leave_out(number, error):
                    raise
                failed = error
                if self.ranks.world > 1:
                    self._failed[number] = error
                    return _copied(self._last[number]), self.loaders.replaced(number)
            else:
                self._in_a_row = 0
                if self.ranks.world > 1:
                    self._last[number] = _copied(found[0])
                return found

    def _leave_out(self, number: int, error: Exception) -> bool:
        """Whether the batch that has raised is left out; otherwise its error goes on."""
        batch = self.loaders.unreadable(number)
        fault = classify(error)
        if batch is None or self.termination.signal_number is not None:
            return False  # no batch is at fault; a signal kills a loader's workers too
        if fault.cause not in (Cause.DATA, Cause.UNKNOWN):
            return False
        fault = fault._replace(cause=Cause.DATA)  # whatever it is, this batch cannot be read
        limits = self.policy.skip_batch
        while self._unreadable and self._unreadable[0] <= self._reads - limits.within:
            self._unreadable.popleft()
        if "skip_batch" not in self.policy.answers(Cause.DATA):
            return False
        if self._in_a_row >= limits.consecutive or len(self._unreadable) >= limits.count:
            done = "left out" if self.ranks.world == 1 else "replaced by the one before"
            error.add_note(
                f"healcore: {self._in_a_row} unreadable batches in a row and "
                f"{len(self._unreadable)} within {limits.within} were {done}, which is "
                "the limit of [skip_batch]"
            )
            return False
        if self.ranks.world > 1 and number not in self._last:
            return False
        self._unreadable.append(self._reads)
        self._in_a_row += 1
        what = f"{type(error).__name__}: {error}"
        problem = f"batch {batch.index} of epoch {batch.epoch} cannot be read: {what:.300}"
        if self.ranks.world > 1:
            problem += "; the batch before comes again in its place"
        else:
            self.loaders.leave_out(number, batch)
        self.report(fault, problem, answer="skip_batch", batches=[list(batch)])
        return True

    # -- the log --------------------------------------------------------------------------------

    def report(
        self,
        fault: Fault,
        problem: str,
        *,
        answer: str | None,
        attempt: int | None = None,
        wait_s: float | None = None,
        batches: list[list[int]] | None = None,
    ) -> None:
        """Writes the event of a fault, and logs a warning; `answer` None: the exception goes on."""
        self.log.event(
            "fault",
            step=self.step(),
            cause=names(fault.cause),
            sign=fault.sign,
            problem=problem,
            severity=fault.failure.severity,
            diagnosis=fault.failure.diagnosis,
            references=list(fault.failure.references),
            answer=answer,
            attempt=attempt,
            wait_s=wait_s,
            batches=batches,
        )
        self.log.warning(f"step {self.step()}: {problem}")


def _copied(batch: Any) -> Any:
    """A batch from which the loop may take entries out: the arrays are the same."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch
