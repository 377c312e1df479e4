r"""`StepBatches`: which batches the next step has.

    add(batch), add(batch), ...        a step takes the batches since the last step:
      \__ pending_ids, contents __/    several with gradient accumulation
                |
    count_dispatch(pending)            their ids and contents go to the step

A skipped, repeated or compared step needs to know which batches it had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from healcore.runtime.data import BatchId
from healcore.runtime.data.source import SourceCursor
from healcore.runtime.data.sources import Sources
from healcore.runtime.driver import PendingDispatch
from healcore.runtime.run.dispatch_queue import DispatchStart
from healcore.runtime.run.witness.evidence import ObservedBatch

if TYPE_CHECKING:
    from healcore.runtime.run.progress import RunProgress


class StepBatches:
    """The batches since the last step, by their ids, and by their contents where they are compared.

    The ids and contents of a batch that a loader has yielded are kept with the loader
    (`SourceCursor.pending_ids`, `contents`), because an evaluation may read another loader before
    the step.

    Args:
        loaders: the loaders of the program.
        progress: counts the steps of a dispatch.
        keeps_contents: whether weights are compared on the batches, so that their contents are kept
            until the step is judged.

    Attributes:
        last_ids: ids of the batches of the last step.
        last_read: the loader of the last batch, or None before the first batch.
    """

    def __init__(
        self,
        *,
        loaders: Sources,
        progress: RunProgress,
        keeps_contents: bool,
    ) -> None:
        self._loaders = loaders
        self._progress = progress
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
        self._own_batches: list[ObservedBatch] = []
        """The batches that a loop without a loader has passed."""

    def add(self, loader: SourceCursor, batch: Any, batch_id: BatchId) -> None:
        """Adds a batch that a loader has yielded.

        Args:
            loader: the loader.
            batch: the batch, as the loader has yielded it.
            batch_id: its epoch and index.
        """
        self.last_read = loader
        loader.pending_ids.append(batch_id)
        keeps = self._keeps_contents and not self._loop_names_batches
        if keeps and len(loader.pending_ids) <= self._max_per_step:
            loader.contents.append(ObservedBatch(batch))

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
            self._forget_contents()
        self._loop_names_batches = True
        self._contents.append(ObservedBatch(batch, weight))

    def forget_parts(self) -> None:
        """Forgets the parts of batches since the last step, which are repeated in smaller parts.

        Called when memory ran out within a step. Otherwise a comparison of weights would count the
        samples of the failed attempt and of the repeat.
        """
        if self._loop_names_batches:
            self._forget_contents()

    def count_dispatch(self, pending: PendingDispatch) -> DispatchStart:
        """Counts the steps of a dispatch, with the batches of the last loader that yielded.

        A dispatch is one call of a compiled step, or one optimizer step; a compiled loop takes
        several steps in it. The batches that were read since the dispatch before belong to it.

        Args:
            pending: the dispatch that the driver has reported. Its `count` is the number of steps.

        Returns:
            The index of its first step, and its batches.
        """
        loader = self.last_read
        if loader is not None:
            if loader.pending_ids or not loader.in_use:
                self.last_ids = loader.pending_ids
                self._usual_updates, self._updates = self._updates, 0
            self._updates += 1  # more than 1: another update on the same batch
            self._loaders.train(loader)
        if len(self.last_ids) > self._max_per_step:
            self._max_per_step = len(self.last_ids)
        # The update of a scan reads no data that a rollback could skip.
        ids = () if loader is not None and loader.is_scan else tuple(self.last_ids)
        first = DispatchStart(self._progress.step, ids, tuple(self._contents))
        self._forget_pending()  # a step may take batches of several loaders
        self._progress.count(pending.count)
        return first

    def on_rollback(self) -> None:
        """Forgets the batches of the undone steps, and the batches that were read for a next step.

        Otherwise they would be assigned to the first repeated step.
        """
        self.last_ids = []
        self._forget_pending()

    def end_evaluation(self, loader: SourceCursor) -> None:
        """Forgets the batches that an evaluation has read, which belong to no step.

        Args:
            loader: the loader of the evaluation.
        """
        loader.pending_ids = []
        loader.contents.clear()

    def _forget_pending(self) -> None:
        """Forgets the batches since the last step."""
        self._forget_contents()
        for loader in self._loaders:
            loader.pending_ids = []

    @property
    def _contents(self) -> list[ObservedBatch]:
        """The batches since the last step: of the loader read last, or of a loop without one."""
        if self.last_read is None:
            return self._own_batches
        return self.last_read.contents

    def _forget_contents(self) -> None:
        """Forgets the contents of the batches since the last step, and keeps their ids."""
        self._own_batches.clear()
        for loader in self._loaders:
            loader.contents.clear()

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
        if self.last_read is None:
            return ()
        return tuple(self.last_read.pending_ids)

    @property
    def skipped_steps(self) -> int:
        """Approximate number of steps whose batches rollbacks have skipped.

        The end of a run adds it to the number of steps taken, to judge whether the run has trained
        on most of its data. The number is exact as long as each step takes as many batches as the
        last step.
        """
        return self.steps_of(sum(map(len, self._loaders.skipped_by_source().values())))

    def steps_of(self, batches: int) -> int:
        """The number of steps that take so many batches, rounded down.

        Each step is assumed to take as many batches as the last step. Before the first step, one
        batch a step is assumed.

        Args:
            batches: number of batches.
        """
        return batches // max(1, len(self.last_ids))
