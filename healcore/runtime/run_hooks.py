"""`RunHooks`: what the integration of a trainer uses of an open run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.driver import WEIGHTS, Driver
from healcore.runtime.faults.microbatches import Count, Microbatch
from healcore.runtime.run.run import Run


class RunHooks:
    """What a trainer needs of an open run in addition to the public methods of `Healer`.

    A trainer owns its loop: it counts the steps, saves and ends by itself, and calls user code
    after each step. A program that owns its loop needs none of this. The integrations for Hugging
    Face, Lightning and Arctic use a run through this class only, so that the parts of a run may
    change without them. Get it by `healcore.runtime.healer.hooks_of`.

    Attributes:
        driver: the optimizers and their engines; in torch a `TorchDriver`.
        loaders: the loaders of the run, with their positions.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.driver: Driver = run.driver
        self.loaders: LoaderRegistry = run.loaders

    # -- the start ------------------------------------------------------------------------------

    @property
    def had_completed(self) -> bool:
        """Whether the run in the store had completed, so that this process trains nothing."""
        return self._run.data.had_completed

    def continue_from(self, step: int) -> None:
        """Sets the number of steps done, where the trainer has resumed from its own checkpoint.

        Args:
            step: optimizer steps that the trainer has taken.
        """
        self._run.data.step = step

    def load_engines(self, engines: Mapping[str, Any]) -> None:
        """Loads the states of the policy that a trainer's checkpoint holds.

        Args:
            engines: name of an optimizer -> the state of its engine, of `Driver.engines`.

        Raises:
            StateError: a state is damaged, or of another policy or model. Nothing was loaded.
        """
        try:
            self._run.driver.load(None, engines)
        finally:
            self._run.monitor.read_engines()

    def ignore_first_weights(self) -> None:
        """Does not compare the weights of the next start with those of this one.

        The trainer has loaded a checkpoint of its own. A restart begins with fresh weights, which
        would be taken for another run.
        """
        self._run.record.settings.pop(WEIGHTS, None)

    def reload_before_first_batch(self) -> None:
        """Loads the resumed checkpoint again, before the first batch of this process.

        Callbacks of the trainer have run since the Healer was opened, and may have changed weights.
        """
        data = self._run.data
        if data.resumed_here and not data.passes:
            self._run.restorer.load_state_of(data.step)

    # -- batches and steps ----------------------------------------------------------------------

    def batches(self, loader: Any, limit: Callable[[int], int] | None) -> Iterator[Any]:
        """The batches of all epochs of a loader, until the trainer asks for no more.

        Args:
            loader: the loader, as for `Healer.batches`.
            limit: takes the number of an epoch, and returns how many batches it has; or None if
                the loader itself ends the epoch.
        """
        return self._run.loop.batches(loader, None, None, limit)

    @property
    def pending_batches(self) -> Sequence[BatchId]:
        """The batches that the trainer has received since the last step, in order."""
        return self._run.data.pending_ids

    @property
    def last_batch_ends_epoch(self) -> bool:
        """Whether the newest batch is the last one of its epoch."""
        last = self._run.data.last_read
        return last is not None and last.is_last()

    def parts(
        self,
        batch: Any,
        *,
        count: Count,
        split_obstacle: str,
        last_resort: Callable[[], str],
    ) -> Iterator[Microbatch[Any]]:
        """Splits a batch into parts that fit into memory; see `Healer.microbatches`.

        Args:
            batch: the micro-batch of the trainer.
            count: returns how many items the loss of a part averages over.
            split_obstacle: why the batch cannot be split, or an empty string.
            last_resort: saves memory in another way if a single sample does not fit. Returns what
                it has done, as a clause, or an empty string.
        """
        return self._run.out_of_memory.parts(
            batch, count=count, split_obstacle=split_obstacle, last_resort=last_resort
        )

    def split_inputs_with(self, split: Callable[[Any], Any], join: Callable[[Any], Any]) -> None:
        """Sets how comparisons split the inputs of a step, which is as the step itself does.

        Args:
            split: makes of inputs what `parts` splits.
            join: makes inputs of a part again.
        """
        self._run.batch_parts.to_split = split
        self._run.batch_parts.to_evaluate_from = join

    # -- the trainer's own search of a batch size -----------------------------------------------

    @property
    def is_trial(self) -> bool:
        """Whether the trainer begins again with a smaller batch if memory runs out.

        Such a run ends without a trace, because it has taken no step.
        """
        return self._run.loop.is_trial

    def set_trial(self, is_trial: bool) -> None:
        """Sets `is_trial`.

        Args:
            is_trial: whether the trainer may begin again. Ignored for a resumed run, whose steps
                must not be lost: it is never a trial.
        """
        self._run.loop.is_trial = is_trial and not self._run.data.resumed_here

    # -- the end --------------------------------------------------------------------------------

    def goes_on_after_step(self) -> None:
        """Says that the trainer has stepped, and still has to evaluate, log or save.

        An exception in that code leaves the step's work incomplete, so nothing is saved at it.
        """
        self._run.loop.goes_on_after_step()

    def save_completed(self) -> None:
        """Saves the last state of a run that is complete, before the trainer replaces it.

        Trainers load their best model at the end, which must not be resumed from.
        """
        self._run.saver.save_last(completed=True)
