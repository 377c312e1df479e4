r"""`StepBatches`: reads batches, skips those that cannot be read, and knows the batches of a step.

    read(loader), read(loader), ...    a step takes the batches since the last step:
      \__ pending_ids, contents __/    several with gradient accumulation
                |
    count_dispatch(pending)            their ids and contents go to the step

A skipped, repeated or compared step needs to know which batches it had.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, MutableSequence
from itertools import count
from typing import TYPE_CHECKING, Any

from healcore import console
from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.data.sources import SourceCursor
from healcore.runtime.driver import PendingDispatch
from healcore.runtime.faults.classification import classify
from healcore.runtime.run.dispatch_queue import DispatchStart
from healcore.runtime.run.witness.evidence import ObservedBatch

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class StepBatches:
    """The batches since the last step, by their ids, and by their contents where they are compared.

    The ids (`Sources.pending`) and contents are kept with their loader, because an evaluation may
    read another loader before the step.

    One bad file must not end a run of days. But a disk that has gone makes every batch unreadable.
    So `[skip_batch]` of the policy limits the number of unreadable batches, in a row and within a
    window of reads.

    Args:
        run: the parts of the run.
        keeps_contents: whether weights are compared on the batches, so that their contents are kept
            until the step is judged.

    Attributes:
        last_ids: ids of the batches of the last step.
        last_read: the loader of the last batch, or None before the first batch.
    """

    def __init__(self, run: Run, *, keeps_contents: bool) -> None:
        self._run = run
        self.last_ids: list[BatchId] = []
        self.last_read: SourceCursor | None = None
        self._keeps_contents = keeps_contents
        self._loop_names_batches = False
        """Whether the loop calls `loss`, or `observe` with a batch."""
        self._max_per_step = 1
        """Largest number of batches of a step so far. No more contents are kept, because an
        evaluation takes no step."""
        self._updates = 0
        """Updates on the last batch, in a loop that calls `update` in JAX."""
        self._usual_updates = 0
        """Updates on the batch before the last one."""
        self._contents: list[tuple[SourceCursor | None, ObservedBatch]] = []
        """The batches since the last step, with their loader or None in a loop without one."""
        self._reads = 0
        """Number of reads of this process."""
        self._failed_reads: list[int] = []
        """Numbers of the reads that have failed, among the last `[skip_batch] within`."""
        self._last_error: Exception | None = None
        """The exception of the newest skip: a generator that has ended with it raises it again."""

    # -- reading --------------------------------------------------------------------------------

    def read(self, loader: SourceCursor) -> Any:
        """Reads the next readable batch of a loader.

        With several ranks, the previous batch replaces an unreadable batch. After a skip this rank
        would end its epoch early, and the other ranks would wait for it.

        Raises:
            StopIteration: the last batch was read.
            Exception: any error of the loader that the policy does not skip.
        """
        alone = self._run.ranks.world == 1
        while True:
            self._reads += 1
            try:
                batch, which = loader.next()
            except Exception as error:
                if loader.unreadable is None or not self._skips(loader, loader.unreadable, error):
                    raise
                if alone:
                    continue
                which, loader.unreadable = loader.unreadable, None  # it counts as read
                batch = _copied(loader.substitute)
            else:
                if not alone:
                    loader.substitute = _copied(batch)
            self.last_read = loader
            self._run.loaders.pending.append((loader, which))
            keeps = self._keeps_contents and not self._loop_names_batches
            if keeps and len(self.pending_ids) <= self._max_per_step:
                self._contents.append((loader, ObservedBatch(batch)))
            return batch

    def _skips(self, loader: SourceCursor, batch: BatchId, error: Exception) -> bool:
        """Skips a batch whose read has raised, and logs it. Returns False if the error propagates.

        With several ranks another batch replaces it.
        """
        run = self._run
        if run.end_requests.signal_number is not None:
            return False  # a signal kills a loader's workers too
        fault, alone = classify(error), run.ranks.world == 1
        skips = "skip_batch" in run.policy.answers(Cause.DATA)
        if not skips or fault.cause not in (Cause.DATA, Cause.UNKNOWN) or error is self._last_error:
            return False
        limits = run.policy.skip_batch
        failed = [each for each in self._failed_reads if each > self._reads - limits.within]
        in_a_row = next(n for n in count() if self._reads - 1 - n not in failed)
        if in_a_row >= limits.consecutive or len(failed) >= limits.count:
            error.add_note(
                f"healcore: {in_a_row} unreadable batches in a row and {len(failed)} within "
                f"{limits.within} were skipped, which is the limit of [skip_batch]"
            )
            return False
        if not alone and loader.substitute is None:
            return False
        self._failed_reads, self._last_error = [*failed, self._reads], error
        # The message for an error in a loader's worker ends with the error, after a traceback.
        text = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
        problem = f"{batch} cannot be read: {text:.300}"
        if alone:
            loader.skipped_batch_ids.add(batch)
        else:
            problem += "; the previous batch is used in its place"
        step = run.progress.step
        if run.ranks.rank:  # only rank 0 has a log
            console.warning(f"rank {run.ranks.rank}: step {step}: {problem}")
        # An unknown error of a batch is one of its data.
        fault = fault._replace(cause=Cause.DATA)
        ids, rows = [list(batch)], batch.rows and [batch.rows]
        run.log.fault(step, fault, problem, answer="skip_batch", batches=ids, rows=rows)
        return True

    def add_observed(self, batch: Any, weight: float) -> None:
        """Records a batch, or a part of it, whose loss is the result of `loss_fn`.

        From the first such batch on, weights are compared on these batches, and no longer on the
        batches that the loaders yield: the loop knows better which batches its losses are of.

        Args:
            batch: the batch.
            weight: its share in the loss of the step.
        """
        if not self._keeps_contents:
            return
        if not self._loop_names_batches:
            self._contents = []
        self._loop_names_batches = True
        self._contents.append((self.last_read, ObservedBatch(batch, weight)))

    # -- steps ----------------------------------------------------------------------------------

    def count_dispatch(self, pending: PendingDispatch) -> DispatchStart:
        """Counts the steps of a dispatch, with the batches of the last loader that yielded.

        A dispatch is one call of a compiled step, or one optimizer step; a compiled loop takes
        several steps in it. The batches that were read since the dispatch before belong to it.

        Args:
            pending: the dispatch that the driver has reported. Its `count` is the number of steps.

        Returns:
            The index of its first step, and its batches.
        """
        loader, ids, progress = self.last_read, list(self.pending_ids), self._run.progress
        if loader is not None:
            if ids or not loader.in_use:
                self.last_ids = ids
                self._usual_updates, self._updates = self._updates, 0
            self._updates += 1  # more than 1: another update on the same batch
            self._run.loaders.train(loader)
        self._max_per_step = max(self._max_per_step, len(self.last_ids))
        # The update of a scan reads no data that a rollback could skip.
        if loader is not None and loader.is_scan:
            batches = ()
        else:
            batches = tuple(self.last_ids)
        contents = tuple(each for reader, each in self._contents if reader is loader)
        self._forget()  # a step may take batches of several loaders
        first = DispatchStart(progress.step, batches, contents)
        progress.count(pending.count)
        return first

    def forget_parts(self) -> None:
        """Forgets the parts of batches since the last step, which are repeated in smaller parts.

        Called when memory ran out within a step. Otherwise a comparison of weights would count the
        samples of the failed attempt and of the repeat.
        """
        if self._loop_names_batches:
            self._contents = []

    def clear(self) -> None:
        """Forgets the batches of the undone steps, and the batches that were read for a next step.

        Otherwise they would be assigned to the first repeated step.
        """
        self.last_ids = []
        self._forget()

    def end_evaluation(self, loader: SourceCursor) -> None:
        """Forgets the batches that an evaluation has read, which belong to no step.

        Args:
            loader: the loader of the evaluation.
        """
        self._run.loaders.forget_pending(loader)
        self._contents = [each for each in self._contents if each[0] is not loader]

    def _forget(self) -> None:
        """Forgets the batches since the last step."""
        self._run.loaders.pending, self._contents = [], []

    @property
    def between_steps(self) -> bool:
        """Whether no batch was read since the last step, so that state and loader positions match.

        A checkpoint may be saved only then. A checkpoint from within a step would hold a position
        behind batches that no update has used, and a restart would lose these batches.
        """
        return not (self.pending_ids or self.within_batch)

    @property
    def within_batch(self) -> bool:
        """Whether further updates on this batch are expected.

        As many are expected as on the batch before, as in a loop that takes several optimizer steps
        on each batch. A restart from here would begin with the next batch, and lose these updates.
        False without a loader that the loop reads.
        """
        loader = self.last_read
        if loader is None or not (loader.in_use or loader.left_by_break):
            return False
        return self._updates < self._usual_updates

    @property
    def pending_ids(self) -> tuple[BatchId, ...]:
        """Ids of the batches that were read since the last step, in order.

        They are batches of the loader that was read last. Empty directly after a step, or if the
        program has read no loader. If the next step raises, these batches are named in the message.
        """
        pending = self._run.loaders.pending
        if not pending:  # a step has few calls
            return ()
        return tuple(which for each, which in pending if each is self.last_read)

    @property
    def skipped_steps(self) -> int:
        """Approximate number of steps whose batches rollbacks have skipped.

        The end of a run adds it to the number of steps taken, to judge whether the run has trained
        on most of its data. The number is exact as long as each step takes as many batches as the
        last step.
        """
        return self.steps_of(sum(map(len, self._run.loaders.skipped_by_source().values())))

    def steps_of(self, batches: int) -> int:
        """The number of steps that take so many batches, rounded down.

        Each step is assumed to take as many batches as the last step. Before the first step, one
        batch a step is assumed.

        Args:
            batches: number of batches.
        """
        return batches // max(1, len(self.last_ids))


def _copied(batch: Any) -> Any:
    """A shallow copy of a mutable batch, from which the loop may remove entries."""
    if isinstance(batch, MutableMapping | MutableSequence):
        return copy.copy(batch)
    return batch
