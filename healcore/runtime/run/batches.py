r"""`RunBatches`: the batches of a run, from its loaders to the steps that use them.

    begin(loader) --> next(loader), next(loader), ...        a step takes the batches since the last
                      \__ pending_ids, contents __/          step: several with accumulation
                                  |
                      count_dispatch(pending)                their ids and contents go to the step

A skipped, repeated or compared step needs to know which batches it had. `BatchReader` reads them,
and skips batches that cannot be read.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import MutableMapping, MutableSequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore import console
from healcore.console import counted
from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.data.run_loader import RunLoader
from healcore.runtime.driver import PendingDispatch
from healcore.runtime.faults.failures import Fault, classify
from healcore.runtime.faults.retry import CallAttempt, Retries
from healcore.runtime.run.compare.evidence import ObservedBatch
from healcore.runtime.run.ending.requests import SignalWatch
from healcore.runtime.run.host_state import HostParts, HostState
from healcore.runtime.run.run_settings import change_of_batch_size
from healcore.runtime.run.steps import StepResult

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class RunBatches:
    """Reads batches, counts steps, and assigns batches to steps.

    Args:
        run: the parts of the run.
        stop_signals: the signals that ask the process to end. One that arrives while a rank waits
            for data ends a run of one process at once.
        keeps_batches: whether weights are compared on the batches, so that their contents are kept
            until the step is judged.

    Attributes:
        loaders: the loaders and their positions.
        host: the random generators that loaders draw from.
        step: steps done. A rollback decreases the number.
        steps_taken: steps of this process, including steps that a rollback has undone.
        had_completed: whether the run in the store had completed, and this process has its last
            state.
        last_ids: ids of the batches of the last step.
        last_read: the loader of the last batch, or None before the first batch.
        passes: calls of `begin` in this process.
    """

    def __init__(self, run: Run, stop_signals: SignalWatch, *, keeps_batches: bool) -> None:
        self.run = run
        self._stop_signals = stop_signals
        retries = None
        if "retry" in run.policy.answers(Cause.NETWORK):
            retries = self.retries("reading a batch")
        self.loaders = LoaderRegistry(inform=run.log.info, retries=retries)
        self.host = HostState(self.loaders.position)
        self.step = self.steps_taken = 0
        self.had_completed = False
        self.passes = 0
        self.last_read: RunLoader | None = None
        self._reader = BatchReader(run, stop_signals)
        self._keeps_batches = keeps_batches
        self._loop_names_batches = False
        """Whether the loop calls `loss`, or `observe` with a batch."""
        self.last_ids: list[BatchId] = []
        self._most_per_step = 1
        """Largest number of batches of a step so far. No more contents are kept, because an
        evaluation takes no step."""
        self._updates = 0
        """Updates on the last batch, in a loop that calls `update` in JAX."""
        self._usual_updates = 0
        """Updates on the batch before the last one."""
        self._own_batches: list[ObservedBatch] = []
        """The batches that a loop without a loader has passed."""
        self._generators: HostParts | None = None
        """The random states of the checkpoint, until the first batch; or None."""
        self._resumed_evaluation: RunLoader | None = None
        """The loader of an evaluation that the checkpoint has interrupted, or None."""
        self._resumed = False
        """Whether this process continues at an earlier process's checkpoint."""

    def resume(self, step: int, generators: HostParts | None, *, completed: bool) -> None:
        """Continues at an earlier process's checkpoint.

        Args:
            step: step of the checkpoint.
            generators: the random states of the checkpoint, or None to leave the program's as they
                are. They are restored once the loop's loader is known: moving it draws numbers.
            completed: whether the run had ended with this checkpoint.
        """
        self._resumed = True
        self.had_completed = completed
        self.step = step
        self._generators = generators

    def repeat_pass(self, generators: HostParts) -> None:
        """Begins a pass of the loop again, as a restart from a checkpoint would.

        Sets the random states of the checkpoint, and keeps them until the first step. A loader that
        begins draws its order from them, so the repeated pass has the same order.

        Args:
            generators: random states of the checkpoint.
        """
        self.host.put_back(generators)
        self._generators = generators

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed a run and taken no step since.

        An empty loop is normal then: the run may have been complete, and nothing is left to train.
        Without a resume, a loop that takes no step is an error of the program.
        """
        return self._resumed and not self.steps_taken

    @property
    def repeated_all_passes(self) -> bool:
        """Whether the loop has repeated all passes of earlier processes.

        A loop that begins at an epoch of its own after a restart makes fewer passes. Random states
        from the end of a pass would then be the states of another epoch, so `begin_pass` restores
        them only if this is true or the loop names its epochs.
        """
        has_repeated = self.passes > 0 and self.passes >= self.run.record.passes
        return has_repeated and self.loaders.at_epochs

    def begin(
        self, loader: Any, epochs: int | None, epoch: int | None = None, limit: Any = None
    ) -> RunLoader:
        """Begins to iterate over a loader; see `LoaderRegistry.begin`.

        Restores the random states of a checkpoint where the loader continues within an epoch, and
        reports a batch size that has changed since the run began.

        Args:
            loader: the program's loader.
            epochs: number of epochs to read, or None for no limit.
            epoch: the only epoch to read, which the loop names itself, or None.
            limit: the batches at most in an epoch, see `LoaderRegistry.begin`, or None.

        Returns:
            The loader with its position.
        """
        self.passes += 1
        self.run.record.passes = max(self.run.record.passes, self.passes)
        saved = self.loaders.saved_position(loader, epoch)
        self.restore_generators()  # for an epoch that begins, and draws, after the checkpoint
        begun = self.loaders.begin(loader, epochs, epoch, limit)
        if saved and (begun.can_rewind or saved["index"] or epoch not in (None, saved["epoch"])):
            self.restore_generators()  # a rewind has drawn; an epoch that begins keeps its draws
            self._resumed_evaluation = None
            if not begun.trains:
                self._resumed_evaluation = begun
        self._log_settings(loader, begun)
        for line in self.loaders.notices:
            self.run.log.event("data", step=self.step, outcome=line)
            self.run.log.info(f"data: {line}")
        self.loaders.notices.clear()
        return begun

    def _log_settings(self, loader: Any, begun: RunLoader) -> None:
        """Logs what a loader adds to the settings of the run, and a changed batch size."""
        settings = self.run.record.settings
        log = self.run.log
        before = {*settings}
        change = change_of_batch_size(settings, begun.number, loader)
        new = {name: value for name, value in settings.items() if name not in before}
        if new:
            log.event("data", step=self.step, outcome="a loader is read", settings=new)
        if change:
            log.problem(
                self.step,
                f"{change} (saved -> given): the loader continues at the same number of batches, "
                "which is another position in the data; to start from the first batch, pass an "
                "empty directory",
            )

    def next(self, loader: RunLoader, *, directly_after_step: bool = False) -> Any:
        """Reads the next batch of a loader.

        Args:
            loader: result of `begin`.
            directly_after_step: whether nothing of the program has run since the last step was
                counted. Then the random states are the states that `HostState` may have kept after
                the step.

        Returns:
            The batch, as the loader has yielded it.

        Raises:
            StopIteration: the last epoch has ended.
        """
        alone = self._stop_signals.waiting_for_data() if self.between_steps else nullcontext()
        kept = directly_after_step and self.host.keeps_states
        loader.put_back_random_states = self.host.put_back_after_step if kept else None
        with alone:
            batch, batch_id = self._reader.read(loader, self.step)
        self.last_read = loader
        if loader is not self._resumed_evaluation:
            self._generators = None
        loader.pending_ids.append(batch_id)
        keeps = self._keeps_batches and not self._loop_names_batches
        if keeps and len(loader.pending_ids) <= self._most_per_step:
            loader.contents.append(ObservedBatch(batch))
        loader.use_batch()
        return batch

    def end(self, loader: RunLoader, *, evaluates: bool) -> None:
        """Ends the loop over a loader that has no further batch.

        Args:
            loader: result of `begin`.
            evaluates: whether the loop has taken no step, so that the next pass over the training
                data has not begun.
        """
        if evaluates and loader is self.loaders.last_trained:
            self.loaders.last_trained = self.last_read = None  # a loop over `steps` has none
        if loader is not self.loaders.last_trained:  # an evaluation: its batches are of no step
            loader.pending_ids = []
            loader.contents.clear()
        if not evaluates:
            self.begin_pass(ended=True)
        loader.leave_loop()

    def log_skipped(self, loader: RunLoader) -> None:
        """Logs the batches that the loader has skipped since the last call.

        Writes one event with the ids of the batches and one line with their number, or nothing if
        no batch was skipped.

        Args:
            loader: the loader that the loop reads.
        """
        batches = [list(each) for each in loader.take_skipped()]
        if batches:
            self.run.log.event("skipped_batches", step=self.step, batches=batches)
            text = counted(len(batches), "batch", "batches")
            self.run.log.info(f"step {self.step}: {text} skipped")

    def retries(self, name: str) -> Retries:
        """The retries of a call under the run's policy.

        Args:
            name: what the call does, for the log.

        Returns:
            The retries. They log each attempt, and a signal ends their waits.
        """
        return Retries(name, self.run.policy, self._report_attempt, self._wait)

    def _wait(self, seconds: float) -> None:
        """Waits for the next attempt at a call, which is no hang, unless a signal ends the wait."""
        with self.run.guard.excluding_wait():
            self._stop_signals.sleep(seconds)

    def _report_attempt(self, attempt: CallAttempt) -> None:
        """Logs an attempt that has failed, or the success after failures."""
        line, number, fault, wait = attempt
        if fault is None:
            self.run.log.event("retried", step=self.step, attempt=number, why=line)
            self.run.log.info(line)
            return
        answer = None if wait is None else "retry"
        self.run.log.fault(self.step, fault, line, answer=answer, attempt=number, wait_s=wait)

    def begin_pass(self, *, ended: bool = False) -> None:
        """Keeps the random states before a pass over the data, or restores them after a restart.

        Args:
            ended: whether the previous pass has ended. The checkpoint may be from after that end:
                then its own random states are restored. Otherwise the states at the start of its
                pass are restored, from which the program draws the same order of the data again.
        """
        saved = self._generators
        if saved is not None:
            caught_up = self.repeated_all_passes or self.loaders.epoch_loop.names_epochs
            if ended and caught_up and self.loaders.has_begun_last:
                self.host.put_back(saved)
                self._generators = None
            else:
                self.host.put_back(saved._replace(**saved.at_pass))
        self.host.begin_pass()

    def restore_generators(self) -> None:
        """Restores random states after a restart, because rewinding a loader draws from them.

        Called for each loader until the first batch, and when a loop with its own data begins.
        After the first step it does nothing. Without the call, dropout would use other random
        numbers than in a run that was not interrupted.
        """
        if self._generators is not None:
            self.host.put_back(self._generators)

    def add_observed(self, batch: Any, weight: float) -> bool:
        """Records a batch, or a part of it, whose loss is the result of `loss_fn`.

        From the first such batch on, weights are compared on these batches, and no longer on the
        batches that the loaders yield: the loop knows better which batches its losses are of.

        Args:
            batch: the batch.
            weight: its share in the loss of the step.

        Returns:
            Whether this is the first such batch.
        """
        if not self._keeps_batches:
            return False
        first = not self._loop_names_batches
        self._loop_names_batches = True
        if first:
            self._forget_contents()
        self._contents.append(ObservedBatch(batch, weight))
        return first

    def forget_parts(self) -> None:
        """Forgets the parts of batches since the last step, which are repeated in smaller parts.

        Called when memory ran out within a step. Otherwise a comparison of weights would count the
        samples of the failed attempt and of the repeat.
        """
        if self._loop_names_batches:
            self._forget_contents()

    def count_dispatch(self, pending: PendingDispatch) -> StepResult:
        """Counts the steps of a dispatch, with the batches of the last loader that yielded.

        A dispatch is one call of a compiled step, or one optimizer step; a compiled loop takes
        several steps in it. The batches that were read since the dispatch before belong to it.

        Args:
            pending: the dispatch that the driver has reported. Its `count` is the number of steps.

        Returns:
            The first step of the dispatch with its batches. Its records are still empty, because
            the device
            has not been read.
        """
        loader = self.last_read
        if loader is not None:
            if loader.pending_ids or not loader.in_use:
                self.last_ids = loader.pending_ids
                self._usual_updates, self._updates = self._updates, 0
            self._updates += 1  # more than 1: another update on the same batch
            self.loaders.last_trained = loader
        for each in self.loaders:  # a `break` has ended an evaluation
            each.trains |= bool(each.pending_ids) and (each is loader or not each.left_by_break)
        self._generators = None  # random numbers continue from this step
        if len(self.last_ids) > self._most_per_step:
            self._most_per_step = len(self.last_ids)
        # The update of a scan reads no data that a rollback could skip.
        ids = () if loader is not None and loader.is_scan else tuple(self.last_ids)
        first = StepResult(self.step, [], ids, tuple(self._contents))
        self._forget_pending()  # a step may take batches of several loaders
        self.step += pending.count
        self.steps_taken += pending.count
        return first

    def on_rollback(self, target: int) -> None:
        """Continues at step `target`, and forgets the batches of the undone steps.

        Batches that were read for a step that is not taken any more are forgotten too. Otherwise
        they would be assigned to the first repeated step.

        Args:
            target: the step at which the run continues.
        """
        self.step = target
        self.last_ids = []
        self._forget_pending()

    def _forget_pending(self) -> None:
        """Forgets the batches since the last step."""
        self._forget_contents()
        for loader in self.loaders:
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
        for loader in self.loaders:
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
        return self.steps_of(sum(map(len, self.loaders.skipped_by_loader().values())))

    def steps_of(self, batches: int) -> int:
        """The number of steps that take so many batches, rounded down.

        Each step is assumed to take as many batches as the last step. Before the first step, one
        batch a step is assumed.

        Args:
            batches: number of batches.
        """
        return batches // max(1, len(self.last_ids))


class _Unreadable(NamedTuple):
    """A batch that the policy skips because it cannot be read."""

    batch: BatchId
    fault: Fault
    error: Exception


class BatchReader:
    """Reads the batches of a run's loaders, and skips unreadable batches.

    One bad file must not end a run of days. But a disk that has gone makes every batch unreadable.
    So `[skip_batch]` of the policy limits the number of unreadable batches, in a row and within a
    window of reads.
    """

    def __init__(self, run: Run, stop_signals: SignalWatch) -> None:
        self.run = run
        self._stop_signals = stop_signals
        self._single_rank = run.ranks.world == 1
        self._reads = 0
        self._consecutive_failures = 0
        self._failed_reads: deque[int] = deque()
        """Numbers of the reads that have failed, among the last `[skip_batch] within`."""

    def read(self, loader: RunLoader, step: int) -> tuple[Any, BatchId]:
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
        if batch is None or self._stop_signals.signal_number is not None:
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
            done = "replaced by the previous batch"
            if self._single_rank:
                done = "skipped"
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
    if isinstance(batch, MutableMapping | MutableSequence):
        return copy.copy(batch)
    return batch
