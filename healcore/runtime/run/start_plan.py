"""`decide_start`: whether a start begins a new run, resumes a run, or must not do either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal

from healcore.runtime.program_settings import WEIGHTS
from healcore.runtime.run import run_settings
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.store.checkpoints import CheckpointInfo, StoreError


class StoreNotEmpty(StoreError):
    """The store holds a run that this start must not continue or overwrite.

    Either `resume` is False, or the run has completed and is another run than this program's.
    Nothing was trained. The message says which of the two it is, and what to pass instead.
    """

    __module__ = "healcore.errors"


class StartPlan(Enum):
    """What a start does with the run in the store."""

    NEW = "new"
    """The store is empty: a new run begins."""
    NEW_FROM_LOADED_WEIGHTS = "new from loaded weights"
    """The store holds only the first snapshot of a run, and the program has loaded other weights
    since. The snapshot is deleted, and a new run begins from the weights of the program."""
    RESUME = "resume"
    """The run in the store continues."""
    COMPLETED = "completed"
    """The run in the store has completed: its last state is loaded, and nothing is trained. If only
    an earlier checkpoint can be loaded, the run continues from there instead."""

    @property
    def resumes(self) -> bool:
        """Whether the start loads a checkpoint of the run in the store."""
        return self in (StartPlan.RESUME, StartPlan.COMPLETED)


def decide_start(
    resume: bool | Literal["auto"],
    *,
    place: str,
    saves: Sequence[CheckpointInfo],
    newest: RunRecord | None,
    changes: Mapping[str, str],
    has_trainer: bool,
    completed_here: bool,
) -> StartPlan:
    """Decides what a start does with the run in the store.

    Args:
        resume: the argument of `Healer`.
        place: the name of the store, for messages.
        saves: the checkpoints in the store.
        newest: the newest record in the store, or None if no record can be read.
        changes: settings of the program that differ from the saved settings.
        has_trainer: whether a trainer owns the loop. It decides itself whether its run is complete.
        completed_here: whether this process has completed the run in the store.

    Returns:
        The plan.

    Raises:
        StoreNotEmpty: the run in the store must not be resumed.
    """
    if not saves:
        return StartPlan.NEW
    if resume is not True:
        newest_step = max((each.step for each in saves if not each.is_abandoned), default=0)
        if resume is False:
            raise StoreNotEmpty(
                f"{place} holds checkpoints of an earlier run, up to step {newest_step}: pass an "
                'empty directory, or resume="auto" to resume from them'
            )
        if newest is not None and newest.completed:
            _check_same_run(place, newest_step, changes, completed_here=completed_here)
    if newest is None:
        return StartPlan.RESUME
    has_only_first = {each.step for each in saves} == {newest.first_step}
    if has_only_first and WEIGHTS in changes:
        return StartPlan.NEW_FROM_LOADED_WEIGHTS
    if newest.completed and resume is not True and not has_trainer:
        return StartPlan.COMPLETED
    return StartPlan.RESUME


def _check_same_run(
    place: str, newest_step: int, changes: Mapping[str, str], *, completed_here: bool
) -> None:
    """Raises StoreNotEmpty if a completed run is another run than the run of this program.

    Args:
        place: the name of the store.
        newest_step: step of the newest checkpoint.
        changes: settings of the program that differ from the saved settings.
        completed_here: whether this process has completed the run.
    """
    which = run_settings.why_other_run(changes)
    if completed_here:
        which = "that this process has completed"
    if which:
        raise StoreNotEmpty(
            f"{place} holds a run {which}. Its last step is {newest_step}. Nothing was trained. "
            'Pass an empty directory for each run, as in store=f"runs/{fold}", and set the seed '
            "before the model is made; resume=True resumes the saved run, with its weights and "
            "settings"
        )
