"""`Resumption`: continues a run from its newest intact checkpoint, at the start of a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from healcore.runtime.data.other_ranks import position_of_other_ranks
from healcore.runtime.run.data_state import SavedDataState
from healcore.runtime.run.record.run_record import RunRecord
from healcore.runtime.run.restore.next_start import content_at_start
from healcore.runtime.run.restore.stored import SavedCheckpoint, loader_positions
from healcore.runtime.store.checkpoints import StateMismatch

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class Resumption:
    """Resumes a run in a new process, and leaves out what tries before a stop have changed.

        weights            loaded with the engines; copies of older weights for the comparisons
        facts of the run   comparisons, ledger, monitor and loaders continue from the checkpoint;
                           attempts and settings from the newest record
        a new attempt      begins at the step

    All ranks load the same checkpoint, or none does. The start (`start._resume`) chooses the
    checkpoints that may be used, and reports the result.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def resume(
        self, newest: RunRecord | None, steps: list[int]
    ) -> tuple[int, SavedDataState | None]:
        """Resumes from the first intact checkpoint of `steps`, at the start of a process.

        Args:
            newest: the newest record in the store, or None. The run continues with its attempts and
                its settings, also if an older checkpoint has to be loaded.
            steps: steps of the checkpoints, in descending order.

        Returns:
            The step of the checkpoint; and its random states and positions, for
            `PassStates.resume`, or None if the program's own random states stay.

        Raises:
            NoGoodCheckpoint: no checkpoint is intact.
            StateMismatch: the newest intact one is of another state. An older checkpoint that fits
                would lose the steps since then.
        """
        start = None if newest is None else newest.next_start
        if start is not None and start.step in steps:
            steps = [each for each in steps if each <= start.step]
        load = partial(self._load_resumed, newest=newest)
        try:
            weights, saved = self.run.stored_checkpoints.load_first_intact(steps, load)
        except StateMismatch as error:
            where = self.run.store.place
            raise replace(error, where=where, advice=_advice_for(newest)) from None
        own, _ = content_at_start(self.run, saved, newest)
        self._continue_from(own, saved, weights)
        record = self.run.record
        record.continue_from(newest or own)
        self.run.holding.hold(own.envelope, own.step)
        record.part_growth.on_rollback(own.step)
        record.evaluation_growth.on_rollback(own.step)
        # The program will make a change in undone steps once more.
        record.changes = [each for each in record.changes if each.step < own.step]
        epochs = [each.epoch for each in record.changes]
        self.run.loaders.epoch_loop.changed_in = max(epochs, default=None)
        # Drops the changes that the restart has made: they are not the program's.
        self.run.driver.structure_changes()
        self.run.saver.begin_attempt(own.step)
        record.is_in_body = own.is_in_body
        if own.last_regular is not None:
            self.run.schedule.last_regular = own.last_regular
        return own.step, saved.data_state

    def _load_resumed(self, saved: SavedCheckpoint, *, newest: RunRecord | None) -> dict[int, Any]:
        """Loads the state of a checkpoint of an earlier process.

        Returns:
            Step -> weights of that step, which a comparison needs.
        """
        own, engines = content_at_start(self.run, saved, newest)
        needed: list[int] = []
        if own.comparisons is not None and self.run.comparisons.is_enabled:
            needed = [each.step for each in own.comparisons.anchors]
        weights = self._copies(needed, saved.step)
        repeats = own.repeats_undone_steps(saved.step)
        reset = repeats and self.run.policy.rollback.reset_moments
        self.run.stored_checkpoints.load_program(saved.state, engines, reset=reset)
        if saved.step in needed:
            weights[saved.step] = self.run.driver.copy_weights()
        return weights

    def _copies(self, needed: Sequence[int], resumed: int) -> dict[int, Any]:
        """The weights of the needed checkpoints before the resumed one; changes live state.

        A checkpoint that some rank cannot load is skipped. The resumed one is not affected.
        """
        copies: dict[int, Any] = {}
        for step in needed:
            if step >= resumed:
                continue
            weights = None
            try:
                self.run.stored_checkpoints.load_step(step)
                weights = self.run.driver.copy_weights()
            except Exception as error:
                problem = f"the weights of checkpoint {step} cannot be compared: {error}"
                self.run.log.event("problem", step=resumed, problem=problem)
            if all(self.run.ranks.gather(weights is not None)):
                copies[step] = weights
        return copies

    def _continue_from(
        self, own: RunRecord, saved: SavedCheckpoint, weights: Mapping[int, Any]
    ) -> None:
        """Continues comparisons, ledger, monitor and loaders from a checkpoint that was loaded.

        Args:
            own: the record of the checkpoint, see `content_at_start`.
            saved: the checkpoint.
            weights: result of `_load_resumed`.
        """
        self.run.record.healthy = own.healthy
        if own.comparisons is not None:
            self.run.comparisons.continue_from(own.comparisons, weights)
        self.run.ledger.continue_from(own.ledger, saved.step)
        self.run.monitor.state.continue_from(own.monitor)
        positions = {**(saved.position or {})}
        if own.repeats_undone_steps(saved.step):
            positions |= _kept_positions(own, saved)
        self.run.loaders.resume(positions, own.skipped)


def _kept_positions(own: RunRecord, saved: SavedCheckpoint) -> dict[str, Any]:
    """Number of a loader that the last rollback did not rewind -> its position, which it keeps.

    If the number of ranks has changed since, its epoch begins again, as the epochs of the other
    loaders do.
    """
    saved_by = None
    for each in loader_positions(saved.position).values():
        if "ranks" in each:
            saved_by = each["ranks"]
            break
    if not saved_by:
        return dict(own.forward)
    moved = {}
    for name, position in own.forward.items():
        moved[name] = position_of_other_ranks(position, saved_by)
    return moved


def _advice_for(newest: RunRecord | None) -> str:
    """What to do about a checkpoint that does not fit, if the program has changed its model.

    Args:
        newest: the newest record in the store, or None.

    Returns:
        Sentences for the error message, or an empty string without a change.
    """
    if newest is None or not newest.changes:
        return ""
    which = ", ".join(f"at step {each.step} (epoch {each.epoch})" for each in newest.changes[-3:])
    return (
        f"The program has changed the structure of its model while it trained, {which}. Make the "
        "same changes before `with Healer(...)`, and not again in the loop; "
        'docs/data-and-resume.md shows it under "A model that changes while it trains"'
    )
