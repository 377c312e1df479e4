"""`BatchReader`: reads the next batch of a loader, and skips a batch that cannot be read."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any

from healcore import console
from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.data.source import SourceCursor
from healcore.runtime.faults.classification import classify

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class BatchReader:
    """Reads the batches of a run's loaders, and skips unreadable batches.

    One bad file must not end a run of days. But a disk that has gone makes every batch unreadable.
    So `[skip_batch]` of the policy limits the number of unreadable batches, in a row and within a
    window of reads.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reads = 0
        """Number of reads of this process."""
        self._consecutive_failures = 0
        self._last: Exception | None = None
        """The exception of the newest skip: a generator that has ended with it raises it again."""
        self._failed_reads: deque[int] = deque()
        """Numbers of the reads that have failed, among the last `[skip_batch] within`."""

    def read(self, loader: SourceCursor, step: int) -> tuple[Any, BatchId]:
        """Reads the next readable batch.

        With several ranks, the previous batch replaces an unreadable batch. After a skip this rank
        would end its epoch early, and the other ranks would wait for it.

        Args:
            loader: the loader.
            step: the step that is about to use the batch, for the log.

        Returns:
            The batch and its id.

        Raises:
            StopIteration: the last batch was read.
            Exception: any error of the loader that the policy does not skip.
        """
        single_rank = self._run.ranks.world == 1
        while True:
            self._reads += 1
            try:
                batch, batch_id = loader.next()
            except Exception as error:
                unreadable = loader.unreadable
                if unreadable is None or not self._skips(loader, unreadable, error, step):
                    raise
                if single_rank:
                    continue
                loader.unreadable = None  # it counts as read
                return _copied(loader.substitute), unreadable
            self._consecutive_failures = 0
            if not single_rank:
                loader.substitute = _copied(batch)
            return batch, batch_id

    def _skips(self, loader: SourceCursor, batch: BatchId, error: Exception, step: int) -> bool:
        """Skips a batch whose read has raised, and logs it. Returns False if the error propagates.

        With several ranks another batch replaces it.
        """
        if self._run.end_requests.signal_number is not None:
            return False  # a signal kills a loader's workers too
        fault, single_rank = classify(error), self._run.ranks.world == 1
        skips = "skip_batch" in self._run.policy.answers(Cause.DATA)
        if not skips or fault.cause not in (Cause.DATA, Cause.UNKNOWN) or error is self._last:
            return False
        limits, failed = self._run.policy.skip_batch, self._failed_reads
        in_a_row = self._consecutive_failures
        while failed and failed[0] <= self._reads - limits.within:
            failed.popleft()
        if in_a_row >= limits.consecutive or len(failed) >= limits.count:
            error.add_note(
                f"healcore: {in_a_row} unreadable batches in a row and {len(failed)} within "
                f"{limits.within} were skipped, which is the limit of [skip_batch]"
            )
            return False
        if not single_rank and loader.substitute is None:
            return False
        failed.append(self._reads)
        self._consecutive_failures += 1
        self._last = error
        # torch puts the traceback of a loader's worker into its message.
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        text = " ... ".join(dict.fromkeys((lines[0][:300], lines[-1][:300])))
        problem = f"{batch} cannot be read: {text}"
        if single_rank:
            loader.skipped_batch_ids.add(batch)
        else:
            problem += "; the previous batch is used in its place"
        rank = self._run.ranks.rank
        if rank:  # only rank 0 has a log
            console.warning(f"rank {rank}: step {step}: {problem}")
        # An unknown error of a batch is one of its data.
        fault = fault._replace(cause=Cause.DATA)
        ids, rows = [list(batch)], batch.rows and [batch.rows]
        self._run.log.fault(step, fault, problem, answer="skip_batch", batches=ids, rows=rows)
        return True


def _copied(batch: Any) -> Any:
    """A shallow copy of a mutable batch, from which the loop may remove entries."""
    if isinstance(batch, MutableMapping | MutableSequence):
        return copy.copy(batch)
    return batch
