"""`RunBatches`: the loaders of a run, and the batches that its loops read from them.

A loop calls:

    begin(loader) --> next(loader), next(loader), ... --> end(loader)
                          |
                      BatchReader reads, and skips what cannot be read
                          |
                      StepBatches keeps which batches the next step has
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healcore.console import counted
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.data.run_loader import RunLoader
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.batches.batch_reader import BatchReader
from healcore.runtime.run.run_settings import change_of_batch_size

if TYPE_CHECKING:
    from healcore.runtime.run.batches.pass_states import PassStates
    from healcore.runtime.run.batches.step_batches import StepBatches
    from healcore.runtime.run.data_state import DataState
    from healcore.runtime.run.progress import RunProgress
    from healcore.runtime.run.run_record import RunRecord


class RunBatches:
    """Reads the batches of a run, from the begin of a loop over a loader to its end.

    Args:
        reader: reads a batch, or skips it.
        loaders: the loaders of the program, with their positions.
        step_batches: keeps which batches the next step has.
        pass_states: the random states of a checkpoint.
        data_state: the random states after the last step.
        progress: the number of steps.
        record: the settings of the run, to which a loader adds its own.
        log: the log, for changed settings and skipped batches.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        loaders: LoaderRegistry,
        step_batches: StepBatches,
        pass_states: PassStates,
        data_state: DataState,
        progress: RunProgress,
        record: RunRecord,
        log: RunLog,
    ) -> None:
        self._reader = reader
        self._loaders = loaders
        self._step_batches = step_batches
        self._pass_states = pass_states
        self._data_state = data_state
        self._progress = progress
        self._record = record
        self._log = log
        self._resumed_evaluation: RunLoader | None = None
        """The loader of an evaluation that the checkpoint has interrupted, or None."""
        self._has_warned_of_used_up = False

    def begin(
        self,
        loader: Any,
        epochs: int | None,
        epoch: int | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> RunLoader:
        """Begins to iterate over a loader; see `LoaderRegistry.begin`.

        Restores the random states of a checkpoint where the loader continues within an epoch, and
        reports a batch size that has changed since the run began.

        Args:
            loader: the program's loader.
            epochs: number of epochs to read, or None for no limit.
            epoch: the only epoch to read, which the loop names itself, or None.
            limit: takes the number of an epoch and returns its largest number of batches, or None
                for no limit.

        Returns:
            The loader with its position.
        """
        states = self._pass_states
        states.count_pass()
        saved = self._loaders.saved_position(loader, epoch)
        states.restore()  # for an epoch that begins, and draws, after the checkpoint
        begun = self._loaders.begin(loader, epochs, epoch, limit)
        if saved and (begun.can_rewind or saved["index"] or epoch not in (None, saved["epoch"])):
            states.restore()  # a rewind has drawn; an epoch that begins keeps its draws
            self._resumed_evaluation = None
            if not begun.trains:
                self._resumed_evaluation = begun
        self._log_settings(loader, begun)
        if epoch is not None and begun.is_used_up:
            self._warn_of_used_up(epoch)
        for line in self._loaders.notices:
            self._log.event("data", step=self._progress.step, outcome=line)
            self._log.info(f"data: {line}")
        self._loaders.notices.clear()
        return begun

    def _log_settings(self, loader: Any, begun: RunLoader) -> None:
        """Logs what a loader adds to the settings of the run, and a changed batch size."""
        settings = self._record.settings
        log, step = self._log, self._progress.step
        before = {*settings}
        change = change_of_batch_size(settings, begun.number, loader)
        new = {name: value for name, value in settings.items() if name not in before}
        if new:
            log.event("data", step=step, outcome="a loader is read", settings=new)
        if change:
            log.problem(
                step,
                f"{change} (saved -> given): the loader continues at the same number of batches, "
                "which is another position in the data; to start from the first batch, pass an "
                "empty directory",
            )

    def _warn_of_used_up(self, epoch: int) -> None:
        """Warns, once, of an iterator that has no batch for an epoch of the program's loop.

        Without healcore the program would continue after a pass without a batch, so this is no
        error.
        """
        if self._has_warned_of_used_up:
            return
        self._has_warned_of_used_up = True
        self._log.problem(
            self._progress.step,
            f"epoch {epoch} has no batch: the loader is an iterator, which can be read only once, "
            "and it is exhausted. To read batches in each epoch, pass a function that makes the "
            "iterator: healer.batches(lambda: stream(seed=healer.epoch), epoch=epoch)",
        )

    def next(
        self, loader: RunLoader, *, directly_after_step: bool = False, in_evaluation: bool = False
    ) -> Any:
        """Reads the next batch of a loader.

        Args:
            loader: result of `begin`.
            directly_after_step: whether nothing of the program has run since the last step was
                counted. Then the random states are the states that `DataState` may have kept after
                the step.
            in_evaluation: see `LoopState.in_evaluation`.

        Returns:
            The batch, as the loader has yielded it.

        Raises:
            StopIteration: the last epoch has ended.
        """
        # A signal ends a run of one process while it waits, but not within a step or an evaluation.
        may_end = self._step_batches.between_steps and not in_evaluation
        loader.put_back_random_states = None
        if directly_after_step and self._data_state.keeps_states:
            loader.put_back_random_states = self._data_state.put_back_after_step
        batch, batch_id = self._reader.read(loader, self._progress.step, between_steps=may_end)
        if loader is not self._resumed_evaluation:
            self._pass_states.forget()
        self._step_batches.add(loader, batch, batch_id)
        loader.use_batch()
        return batch

    def end(self, loader: RunLoader, *, trains: bool, ends_pass: bool) -> None:
        """Ends the loop over a loader that has no further batch.

        Args:
            loader: result of `begin`.
            trains: whether the loop may have taken steps. After a restart it has not, until the
                training data have their place again.
            ends_pass: whether a pass of the program's loop has ended, also one that a restart
                repeats without batches. An evaluation in the body of a training loop is no pass.
        """
        step_batches = self._step_batches
        if not trains and loader is self._loaders.last_trained:
            self._loaders.last_trained = None  # a loop over `steps` has no loader
            step_batches.last_read = None
        if loader is not self._loaders.last_trained:
            step_batches.end_evaluation(loader)
        if ends_pass:
            self._pass_states.begin_pass(ended=True)
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
            step = self._progress.step
            self._log.event("skipped_batches", step=step, batches=batches)
            text = counted(len(batches), "batch", "batches")
            self._log.info(f"step {step}: {text} skipped")

    def on_rollback(self, target: int) -> None:
        """Continues at step `target`, and forgets the batches of the undone steps.

        Args:
            target: the step at which the run continues.
        """
        self._progress.step = target
        self._step_batches.on_rollback()
