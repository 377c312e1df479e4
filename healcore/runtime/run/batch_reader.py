"""`BatchReader`: reads batches, and skips those that cannot be read."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore import console
from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import RunLoader
from healcore.runtime.faults.failures import Fault, classify
from healcore.runtime.run.termination import SignalWatch

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class _Unreadable(NamedTuple):
    """A batch that the policy skips because it cannot be read."""

    batch: BatchId
    fault: Fault
    error: Exception


class BatchReader:
    """Reads the batches of a run's loaders, within the limits of `[skip_batch]`."""

    def __init__(self, run: Run, signals: SignalWatch) -> None:
        self.run = run
        self._signals = signals
        self._single_rank = run.ranks.world == 1
        self._reads = self._consecutive_failures = 0
        self._failed_reads: deque[int] = deque()  # among the last `[skip_batch] within`

    def read(self, loader: RunLoader, step: int) -> tuple[Any, BatchId]:
        """The next readable batch and its id. Raises StopIteration after the last batch.

        With several ranks, the previous batch replaces an unreadable batch. After a skip this rank
        would end its epoch early, and the other ranks would wait for it.
        """
        skip: _Unreadable | None = None  # carried out once the loader has yielded the batch after
        while True:
            self._reads += 1
            try:
                result = loader.next()
            except Exception as error:
                if skip is not None and error is not skip.error:
                    self._skip(loader, skip, step)
                skip = self._skip_for(loader, error)
                if skip is None:
                    raise
                if not self._single_rank:
                    self._skip(loader, skip, step)
                    loader.unreadable = None  # it counts as read
                    return _copied(loader.substitute), skip.batch
            else:
                if skip is not None:
                    self._skip(loader, skip, step)
                self._consecutive_failures = 0
                if not self._single_rank:
                    loader.substitute = _copied(result[0])
                return result

    def _skip_for(self, loader: RunLoader, error: Exception) -> _Unreadable | None:
        """The batch to skip, whose read has raised, or None if the error propagates."""
        batch = loader.unreadable
        if batch is None or self._signals.signal_number is not None:
            return None  # no batch is at fault; a signal kills a loader's workers too
        fault = classify(error)
        skips = "skip_batch" in self.run.policy.answers(Cause.DATA)
        if not skips or fault.cause not in (Cause.DATA, Cause.UNKNOWN):
            return None
        limits = self.run.policy.skip_batch
        failed = self._failed_reads
        in_a_row = self._consecutive_failures
        while failed and failed[0] <= self._reads - limits.within:
            failed.popleft()
        if in_a_row >= limits.consecutive or len(failed) >= limits.count:
            done = "skipped" if self._single_rank else "replaced by the previous batch"
            error.add_note(
                f"healcore: {in_a_row} unreadable batches in a row and {len(failed)} within "
                f"{limits.within} were {done}, which is the limit of [skip_batch]"
            )
            return None
        if not self._single_rank and loader.substitute is None:
            return None
        failed.append(self._reads)
        self._consecutive_failures += 1
        # An unknown error of a batch is one of its data.
        return _Unreadable(batch, fault._replace(cause=Cause.DATA), error)

    def _skip(self, loader: RunLoader, skip: _Unreadable, step: int) -> None:
        """Skips the batch, unless another batch has replaced it, and logs the fault."""
        batch, fault, error = skip
        # torch puts the traceback of a loader's worker into its message.
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        text = " ... ".join(dict.fromkeys((lines[0][:300], lines[-1][:300])))
        problem = f"{batch} cannot be read: {text}"
        if self._single_rank:
            loader.skipped_batch_ids.add(batch)
        else:
            problem += "; the previous batch is used in its place"
        if self.run.ranks.rank:  # only rank 0 has a log
            console.warning(f"rank {self.run.ranks.rank}: step {step}: {problem}")
        ids = [list(batch)]
        rows = batch.rows and [batch.rows]
        answer = "skip_batch"
        self.run.log.fault(step, fault, problem, answer=answer, batches=ids, rows=rows)


def _copied(batch: Any) -> Any:
    """A shallow copy of a mutable batch, from which the loop may remove entries."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch
