"""`RunBatches`: the batches of a run, from its loaders to the steps that use them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from healcore.console import counted
from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry, RunLoader
from healcore.runtime.driver import PendingDispatch
from healcore.runtime.faults.retry import CallAttempt, Retries
from healcore.runtime.run.batch_reader import BatchReader
from healcore.runtime.run.evidence import ObservedBatch
from healcore.runtime.run.host_state import HostParts, HostState
from healcore.runtime.run.run_settings import change_of_batch_size
from healcore.runtime.run.steps import StepResult
from healcore.runtime.run.termination import SignalWatch

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class RunBatches:
    """Reads batches, counts steps, and assigns batches to steps.

    `keeps_batches` says whether weights are compared on the batches.

    Attributes:
        loaders: the loaders and their positions.
        host: the random generators that loaders draw from.
        step: steps done. A rollback decreases the number.
        steps_taken: steps of this process, including steps that a rollback has undone.
        had_completed: whether the run in the store had completed, and this process has its last
            state.
        last_ids: ids of the batches of the last step.
        last_read: the loader of the last batch, or None before the first batch.
    """

    def __init__(self, run: Run, signals: SignalWatch, *, keeps_batches: bool) -> None:
        self.loaders = LoaderRegistry()
        self.loaders.inform = run.log.info
        self.host = HostState(self.loaders.position)
        self.step = self.steps_taken = 0
        self.had_completed = False
        self.passes = 0  # calls of `batches` in this process
        self.last_read: RunLoader | None = None
        self.run = run
        self._signals = signals
        if "retry" in run.policy.answers(Cause.NETWORK):
            self.loaders.retries = self.retries("reading a batch")
        self._reader = BatchReader(run, signals)
        self._keeps_batches = keeps_batches
        self._loop_names_batches = False  # whether it calls `loss`, or `observe` with a batch
        self.last_ids: list[BatchId] = []
        # Largest number of batches of a step so far. No more contents are kept, because an
        # evaluation takes no step.
        self._most_per_step = 1
        # Updates on the last batch and on the one before, in a loop that calls `update` in JAX.
        self._updates = self._usual_updates = 0
        self._own_batches: list[ObservedBatch] = []  # which a loop without a loader has passed
        self._generators: HostParts | None = None  # of the checkpoint, until the first batch
        self._resumed_evaluation: RunLoader | None = None  # an evaluation of before the checkpoint
        self._resumed = False

    def resume(self, step: int, generators: HostParts | None, *, completed: bool) -> None:
        """Continues an earlier process's checkpoint; `completed` is whether its run had ended."""
        self._resumed = True
        self.had_completed = completed
        self.step = step
        self._generators = generators

    def repeat_pass(self, generators: HostParts) -> None:
        """Begins a pass of the loop again as a restart from a checkpoint would."""
        self.host.put_back(generators)
        self._generators = generators

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed a run and taken no step since."""
        return self._resumed and not self.steps_taken

    @property
    def repeated_all_passes(self) -> bool:
        """Whether the loop has repeated all passes of earlier processes.

        A loop that begins at an epoch of its own after a restart makes fewer passes.
        """
        return 0 < self.passes >= self.run.record.passes and self.loaders.at_epochs

    def begin(
        self, loader: Any, epochs: int | None, epoch: int | None = None, limit: Any = None
    ) -> RunLoader:
        """Begins to iterate over a loader; see `LoaderRegistry.begin`."""
        self.passes += 1
        self.run.record.passes = max(self.run.record.passes, self.passes)
        saved = self.loaders.saved_position(loader, epoch)
        self.restore_generators()  # for an epoch that begins, and draws, after the checkpoint
        begun = self.loaders.begin(loader, epochs, epoch, limit)
        if saved and (begun.can_rewind or saved["index"] or epoch not in (None, saved["epoch"])):
            self.restore_generators()  # a rewind has drawn; an epoch that begins keeps its draws
            self._resumed_evaluation = None if begun.trains else begun
        settings = self.run.record.settings
        log = self.run.log
        before = {*settings}
        change = change_of_batch_size(settings, begun.number, loader)
        if new := {n: v for n, v in settings.items() if n not in before}:
            log.event("data", step=self.step, outcome="a loader is read", settings=new)
        if change:
            log.problem(
                self.step,
                f"{change} (saved -> given): the loader continues at the same number of batches, "
                "which is another position in the data; to start from the first batch, pass an "
                "empty directory",
            )
        for line in self.loaders.notices:
            log.event("data", step=self.step, outcome=line)
            log.info(f"data: {line}")
        self.loaders.notices.clear()
        return begun

    def next(self, loader: RunLoader, *, directly_after_step: bool = False) -> Any:
        """Reads the next batch of a loader. Raises StopIteration after the last epoch.

        `directly_after_step` is whether nothing of the program has run since the last step was
        counted. Then the random states are those that `HostState` may have kept after the step.
        """
        alone = self._signals.waiting_for_data() if self.between_steps else nullcontext()
        kept = directly_after_step and self.host.keeps_states
        loader.put_back_random_states = self.host.put_back_after_step if kept else None
        with alone:
            batch, batch_id = self._reader.read(loader, self.step)
        self.last_read = loader
        self._generators = self._generators if loader is self._resumed_evaluation else None
        loader.pending_ids.append(batch_id)
        keeps = self._keeps_batches and not self._loop_names_batches
        if keeps and len(loader.pending_ids) <= self._most_per_step:
            loader.contents.append(ObservedBatch(batch))
        loader.in_use = True
        return batch

    def end(self, loader: RunLoader, *, evaluates: bool) -> None:
        """Ends the loop over a loader that has no further batch."""
        if evaluates and loader is self.loaders.last_trained:
            self.loaders.last_trained = self.last_read = None  # a loop over `steps` has none
        if loader is not self.loaders.last_trained:  # an evaluation: its batches are of no step
            loader.pending_ids = []
            loader.contents.clear()
        if not evaluates:
            self.begin_pass(ended=True)
        loader.in_loop = False

    def log_skipped(self, loader: RunLoader) -> None:
        """Logs the batches that the loader has skipped since the last call."""
        if batches := [list(each) for each in loader.take_skipped()]:
            self.run.log.event("skipped_batches", step=self.step, batches=batches)
            text = counted(len(batches), "batch", "batches")
            self.run.log.info(f"step {self.step}: {text} skipped")

    def retries(self, name: str) -> Retries:
        """The retries of a call under the run's policy."""
        return Retries(name, self.run.policy, self._report_attempt, self._signals.sleep)

    def _report_attempt(self, attempt: CallAttempt) -> None:
        line, number, fault, wait = attempt
        if fault is None:
            self.run.log.event("retried", step=self.step, attempt=number, why=line)
            self.run.log.info(line)
            return
        answer = None if wait is None else "retry"
        self.run.log.fault(self.step, fault, line, answer=answer, attempt=number, wait_s=wait)

    def begin_pass(self, *, ended: bool = False) -> None:
        """Keeps the random states before a pass over the data, or restores them after a restart.

        `ended` is whether the previous pass has ended. The checkpoint may be from after that end.
        """
        if (saved := self._generators) is not None:
            here = ended and (self.repeated_all_passes or self.loaders.names_epochs)
            self.host.put_back(saved if here else saved._replace(**saved.at_pass))
            self._generators = None if here else saved
        self.host.begin_pass()

    def restore_generators(self) -> None:
        """Restores random states after a restart, because rewinding a loader draws from them.

        Called for each loader until the first batch, and when a loop with its own data begins.
        """
        if self._generators is not None:
            self.host.put_back(self._generators)

    def add_observed(self, batch: Any, weight: float) -> bool:
        """Records a batch, or a part of it, whose loss is the result of `loss_fn`.

        Returns whether this is the first such batch.
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
        """Forgets the parts of batches since the last step, which are repeated in smaller parts."""
        if self._loop_names_batches:
            self._forget_contents()

    def count_dispatch(self, pending: PendingDispatch) -> StepResult:
        """Counts the steps of a dispatch, with the batches of the last loader that yielded."""
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
        """Forgets the batches of the steps from `target` on."""
        self.step = target
        self.last_ids = []
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._forget_contents()
        for loader in self.loaders:
            loader.pending_ids = []

    @property
    def _contents(self) -> list[ObservedBatch]:
        """The batches since the last step: of the loader read last, or of a loop without one."""
        return self._own_batches if self.last_read is None else self.last_read.contents

    def _forget_contents(self) -> None:
        self._own_batches.clear()
        for loader in self.loaders:
            loader.contents.clear()

    @property
    def between_steps(self) -> bool:
        """Whether no batch was read since the last step: state and loader positions match."""
        return not (self.pending_ids or self.within_batch)

    @property
    def within_batch(self) -> bool:
        """Whether further updates on this batch follow, if it has as many as the batch before.

        A restart from here would begin with the next batch, and lose these updates.
        """
        in_use = (loader := self.last_read) is not None and (loader.in_use or loader.left_by_break)
        return in_use and self._updates < self._usual_updates

    @property
    def pending_ids(self) -> tuple[BatchId, ...]:
        """Ids of the batches since the last step of the loader read last."""
        return () if self.last_read is None else tuple(self.last_read.pending_ids)

    @property
    def skipped_steps(self) -> int:
        """Approximate number of steps whose batches rollbacks have skipped."""
        return self.steps_of(sum(map(len, self.loaders.skipped_by_loader().values())))

    def steps_of(self, batches: int) -> int:
        """Number of steps that take so many batches, if each takes as many as the last step."""
        return batches // max(1, len(self.last_ids))
