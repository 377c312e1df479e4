"""`LastState`: what the last save of a run may hold."""

from __future__ import annotations

from enum import Enum

from healcore.events.models import Ending


class LastState(Enum):
    """What a checkpoint of the program's state at the end of its run would be worth.

        how the run ends                                                     state
        ------------------------------------------------------------------   --------------
        the loop has ended by itself                                         COMPLETE
        within an optimizer step, or with a step that was not counted        UNUSABLE
        within an evaluation in the body of the training loop, or while a    UNUSABLE
        trainer still evaluates, logs or saves after its step
        between two steps, by a stop of the policy                           UNUSABLE
        between two steps, for another reason                                COMPLETE
        after batches were read for a step, by a stop file, if the run       BEFORE_BATCHES
        can resume exactly
        after batches were read for a step, for another reason               UNUSABLE

    The first line that applies decides.
    """

    COMPLETE = "complete"
    """The state after the last step."""
    BEFORE_BATCHES = "before_batches"
    """The state after the last step, once the loaders are moved back before the unused batches."""
    UNUSABLE = "unusable"
    """A partly changed state, or weights that the policy has rejected. A restart must resume from
    an earlier checkpoint."""


def last_state(
    *,
    completed: bool,
    has_begun_step: bool,
    has_unfinished_work: bool,
    between_steps: bool,
    ending: Ending,
    by_stop_file: bool,
    resumes_exactly: bool,
) -> LastState:
    """The state from which a restart could resume, by the table of `LastState`.

    Args:
        completed: whether the loop has ended by itself.
        has_begun_step: whether the run ends within an optimizer step, or with a step that was not
            counted.
        has_unfinished_work: see `LoopState.has_unfinished_work`.
        between_steps: whether no batch was read since the last step.
        ending: how the run ends.
        by_stop_file: whether a stop file has asked for the end.
        resumes_exactly: whether a restart repeats batches and random numbers.
    """
    if completed:
        return LastState.COMPLETE
    if has_begun_step or has_unfinished_work:
        return LastState.UNUSABLE
    if between_steps:
        if ending == Ending.STOPPED:
            return LastState.UNUSABLE
        return LastState.COMPLETE
    if by_stop_file and resumes_exactly:
        return LastState.BEFORE_BATCHES
    return LastState.UNUSABLE
