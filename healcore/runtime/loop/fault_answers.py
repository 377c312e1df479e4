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
from typing import Any, NamedTuple, ParamSpec, TypeVar

from healcore.core.verdict import Cause, names
from healcore.policy.recovery import Retry
from healcore.runtime.checkpoints.host_state import HostState
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.faults import Fault, classify
from healcore.runtime.faults.retry import Attempt, delay, is_retried, own_random, repeated
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.termination import TerminationWatch
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")


class _Skip(NamedTuple):
    """A batch that cannot be read, and that the policy skips."""

    fault: Fault
    batch: BatchId
    problem: str


@dataclass(eq=False, kw_only=True)
class FaultAnswers:
    """Carries out the policy's rules for faults, and logs each fault."""

    policy: HostPolicy
    loaders: LoaderRegistry
    ranks: Ranks
    host: HostState
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

    @property
    def _retry(self) -> Retry | None:
        """How the policy repeats what has failed in the network; None: it does not."""
        return self.policy.retry if "retry" in self.policy.answers(Cause.NETWORK) else None

    # -- network --------------------------------------------------------------------------------

    def retrying(self, call: Callable[P, T]) -> Callable[P, T]:
        """See `Healer.retrying`."""
        return repeated(
            call,
            self._retry,
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
        pending: _Skip | None = None  # it is skipped once the loader has gone on after it
        attempt = 1
        while True:
            self._reads += 1
            try:
                found = self.loaders.next(number, after=failed)
            except Exception as error:
                if pending is not None and error is not failed:
                    self._carry_out(number, pending)
                if isinstance(error, StopIteration) or error is failed:
                    raise
                if self._repeats_read(number, attempt, error):
                    attempt, pending, failed = attempt + 1, None, None
                    continue
                pending = self._skip_of(number, error)
                if pending is None:
                    raise
                failed = error
                if self.ranks.world > 1:
                    self._carry_out(number, pending)
                    self._failed[number] = error
                    return _copied(self._last[number]), self.loaders.replaced(number)
            else:
                if pending is not None:
                    self._carry_out(number, pending)
                if attempt > 1:
                    self._report_attempt(Attempt(_reading(found[1]), attempt))
                self._in_a_row = 0
                if self.ranks.world > 1:
                    self._last[number] = _copied(found[0])
                return found

    def _repeats_read(self, number: int, attempt: int, error: Exception) -> bool:
        """Whether the read is repeated; then it has waited, and the batch comes next."""
        batch, fault = self.loaders.unreadable(number), classify(error)
        if batch is None or not is_retried(fault) or not self._retry:
            return False
        wait_s = None
        if attempt < self._retry.attempts:
            states = self.host.drawn()
            if self.loaders.reread(number):
                wait_s = delay(self._retry, attempt, fault, own_random())
            else:
                error.add_note(
                    "healcore: the read was not repeated, because the loader has no way back to "
                    "this batch: repeat it in the dataset, with healcore.retrying(call)"
                )
            self.host.set_generators(states)  # moving a loader draws numbers
        self._report_attempt(Attempt(_reading(batch), attempt, error, fault, wait_s))
        if wait_s is None:
            return False
        self.termination.sleep(wait_s)
        return True

    def _skip_of(self, number: int, error: Exception) -> _Skip | None:
        """How the batch that has raised is skipped; None if its error propagates."""
        batch = self.loaders.unreadable(number)
        fault = classify(error)
        if batch is None or self.termination.signal_number is not None:
            return None  # no batch is at fault; a signal kills a loader's workers too
        if fault.cause not in (Cause.DATA, Cause.UNKNOWN):
            return None
        fault = fault._replace(cause=Cause.DATA)  # whatever it is, this batch cannot be read
        limits = self.policy.skip_batch
        while self._unreadable and self._unreadable[0] <= self._reads - limits.within:
            self._unreadable.popleft()
        if "skip_batch" not in self.policy.answers(Cause.DATA):
            return None
        if self._in_a_row >= limits.consecutive or len(self._unreadable) >= limits.count:
            done = "left out" if self.ranks.world == 1 else "replaced by the one before"
            error.add_note(
                f"healcore: {self._in_a_row} unreadable batches in a row and "
                f"{len(self._unreadable)} within {limits.within} were {done}, which is "
                "the limit of [skip_batch]"
            )
            return None
        if self.ranks.world > 1 and number not in self._last:
            return None
        self._unreadable.append(self._reads)
        self._in_a_row += 1
        problem = f"batch {batch.index} of epoch {batch.epoch} cannot be read: {_line_of(error)}"
        if self.ranks.world > 1:
            problem += "; the batch before comes again in its place"
        return _Skip(fault, batch, problem)

    def _carry_out(self, number: int, skip: _Skip) -> None:
        """Leaves the batch out from now on, where no batch replaces it, and logs that."""
        if self.ranks.world == 1:
            self.loaders.leave_out(number, skip.batch)
        self.report(skip.fault, skip.problem, answer="skip_batch", batches=[list(skip.batch)])

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


def _reading(batch: BatchId) -> str:
    return f"reading batch {batch.index} of epoch {batch.epoch}"


def _line_of(error: Exception) -> str:
    """An exception in one line; torch puts the traceback of a loader's worker into its message."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return " ... ".join(dict.fromkeys((lines[0][:300], lines[-1][:300])))


def _copied(batch: Any) -> Any:
    """A batch from which the loop may take entries out: the arrays are the same."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch
