"""`TrainerAccess`: what the integration of a trainer uses of an open run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from healcore.runtime.data import BatchId
from healcore.runtime.data.sources import Sources
from healcore.runtime.driver import WEIGHTS, Driver
from healcore.runtime.faults.microbatches import Count, Microbatch
from healcore.runtime.run.batches.batch_loop import loop_over_batches
from healcore.runtime.run.run import Run

if TYPE_CHECKING:
    from healcore.runtime.healer import Healer

Inputs: TypeAlias = Any
"""A micro-batch as the trainer passes it to its own step: an array or a structure of arrays."""


def open_healer(healer: Healer[Any]) -> TrainerAccess:
    """Opens a Healer, and returns what the integration of a trainer uses of its run.

    A trainer begins and ends its training in two calls, so no `with` block can be around it. The
    integration ends the run by `healer.close(error)`.

    Args:
        healer: a Healer that was not opened before.

    Raises:
        HealcoreError: as for the `with` statement of `Healer`.
    """
    healer._open()
    return trainer_access_of(healer)


def trainer_access_of(healer: Healer[Any]) -> TrainerAccess:
    """Returns what the integration of a trainer uses of an open Healer.

    It is not part of the public API, and may change in any release.

    Args:
        healer: an open Healer.

    Raises:
        HealerError: the Healer was not opened.
    """
    return TrainerAccess(healer._run)


class TrainerAccess:
    """What a trainer needs of an open run in addition to the public methods of `Healer`.

    A trainer owns its loop: it counts steps, saves and ends by itself, and calls user code after
    each step. The integrations for Hugging Face, Lightning and Arctic use a run only through this
    class and the public methods of `Healer`, so that the parts of a run can change without the
    integrations. With Accelerate, Fabric and DeepSpeed the program owns its loop, and needs none of
    this class. `open_healer` opens a Healer and returns the access to its run. `trainer_access_of`
    returns the access to a Healer that is open already.

    The order of the calls, from left to right::

        start                        each batch               each step              end
        had_completed                batches                  mark_step_unfinished   save_completed
        adopt_trainer_checkpoint     parts
        reload_before_first_batch    pending, ends_epoch

    Attributes:
        driver: the optimizers of the run with the states of their policies; a `TorchDriver` in
            torch. A trainer reads the policies' states here for its own checkpoints.
        loaders: the loaders of the run with their positions, and the batches that rollbacks skip.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.driver: Driver = run.driver
        self.loaders: Sources = run.loaders

    # -- the start ------------------------------------------------------------------------------

    @property
    def had_completed(self) -> bool:
        """Whether the run in the store was complete when this process opened it.

        Read this after the Healer is open. A trainer then trains nothing, unless its limits (steps
        or epochs) are now higher than the limits of the completed run.

        Returns:
            True if the run was complete; False for a new run and for a run that continues.
        """
        return self._run.progress.had_completed

    def adopt_trainer_checkpoint(
        self, engines: Mapping[str, Any], *, step: int | None = None
    ) -> None:
        """Loads the engines of the trainer's own checkpoint, from which the trainer has resumed.

        Call this once, after the Healer is open and before the first batch. Without this call the
        policy would begin with empty baselines, and a restart would compare the weights of that
        checkpoint with its own fresh weights and take them for another run.

        Args:
            engines: name of an optimizer -> state of its engine, as `driver.engines()` returned
                when the trainer saved its checkpoint.
            step: number of optimizer steps that the trainer has taken, or None if this run counts
                from 0.

        Raises:
            StateError: a state is damaged, or belongs to another policy or model. No state was
                loaded, and the rest of this call has taken effect.
        """
        run = self._run
        try:
            run.driver.load(None, engines)
        finally:
            run.metrics.read()
            run.record.settings.pop(WEIGHTS, None)
            if step is not None:
                run.progress.step = step

    def reload_before_first_batch(self) -> None:
        """Loads the resumed checkpoint again, unless this process has read a batch.

        Call this just before the first batch. The callbacks of a trainer run between the opening of
        the Healer and the first batch, and may have changed weights that the Healer had restored.
        Does nothing for a new run.
        """
        run = self._run
        if run.progress.resumed_here and not run.loaders.passes:
            run.way_back.load_step(run.progress.step)

    # -- batches and steps ----------------------------------------------------------------------

    def batches(
        self,
        loader: Any,
        epoch_length: Callable[[int], int] | None = None,
        *,
        epochs: int | None = None,
    ) -> Iterator[Any]:
        """Yields the batches of a loader, from the place at which the run stands.

        Between two batches the Healer saves, rolls back, or raises to end the run. A loop over
        `Healer.batches` instead repeats the passes of earlier processes, which yield nothing.

        Args:
            loader: the loader, as for `Healer.batches`.
            epoch_length: takes the number of an epoch, from 0, and returns how many batches the
                epoch has; or None if the loader itself ends the epoch.
            epochs: number of epochs, or None until the trainer asks for no more.

        Returns:
            An iterator over the batches, as the loader yields them. After a rollback it continues
            with the batches of the restored position.
        """
        return loop_over_batches(self._run, loader, epochs, limit=epoch_length, by_trainer=True)

    @property
    def pending(self) -> tuple[BatchId, ...]:
        """Ids of the batches that were read since the last optimizer step, in order.

        Empty before the first batch. The last id is the newest batch. A trainer counts batches by
        itself, and its counts are wrong after a rollback or a skipped batch: it corrects them by
        these ids, between two batches or within a step.
        """
        return self._run.step_batches.pending_ids

    @property
    def ends_epoch(self) -> bool:
        """Whether the newest batch is the last batch of its epoch.

        Read this between two batches. Skipped batches at the end of an epoch do not count. False
        before the first batch, and if the loader has no length.
        """
        loader = self._run.step_batches.last_read
        return loader is not None and loader.is_last()

    def parts(
        self,
        inputs: Inputs,
        *,
        to_split: Callable[[Inputs], Any],
        to_inputs: Callable[[Any], Inputs],
        count: Count,
        split_obstacle: str,
        last_resort: Callable[[], str],
    ) -> Iterator[Microbatch[Any]]:
        """Splits a micro-batch into parts that fit into memory; see `Healer.microbatches`.

        Call this for every micro-batch, around its forward and backward pass. Comparisons of
        weights afterwards split their batches in the same way: a whole batch would run out of
        memory again.

        Args:
            inputs: the micro-batch, as the trainer passes it to its own step.
            to_split: makes of inputs the structure that is split along its first axis. The rows of
                some trainers have another order, in which a slice would separate pairs.
            to_inputs: makes inputs again of a part of the result of `to_split`.
            count: returns how many items (tokens, samples) the mean loss of a part averages over.
            split_obstacle: reason why the micro-batch cannot be split, or an empty string.
            last_resort: saves memory in another way if a single sample does not fit. Returns a
                clause that says what it has changed, or an empty string if it changed nothing.

        Returns:
            An iterator over the parts, whose `batch` is a part of the result of `to_split`.

        Raises:
            RunStopped: a single sample does not fit, or the budget is exhausted.
        """
        split = self._run.out_of_memory
        split.to_split, split.to_evaluate_from = to_split, to_inputs
        return split.parts(
            to_split(inputs), count=count, split_obstacle=split_obstacle, last_resort=last_resort
        )

    def mark_step_unfinished(self) -> None:
        """Says that the trainer has stepped, and still has to evaluate, log or save.

        Call this after the step, before the trainer's code that follows a step. If that code
        raises, the work of the step is incomplete, and the Healer saves no checkpoint of it: a
        restart repeats the step and the code after it. The next step ends the mark.
        """
        self._run.loop.state.mark_step_unfinished()

    # -- the end --------------------------------------------------------------------------------

    def save_completed(self) -> None:
        """Saves the last state of a complete run, before the trainer replaces the state.

        Call this after the last step. Trainers load their best model at the end, and a run must not
        be resumed from that model: the optimizer's moments belong to the last weights.
        """
        self._run.saver.save_last(completed=True)
