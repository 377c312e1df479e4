"""`RateJumps`: remembers the learning rate before it rose by much, for the line of an alarm."""

from __future__ import annotations

from healcore.core.step_record import StepRecord

JUMP_STEPS = 100
"""Steps after a jump in which a line names the rate before."""
_FACTOR = 3.0
"""Smallest ratio of two rates in a row that is a jump. A warm-up that begins at its first rate
doubles at most."""


class RateJumps:
    """Remembers for each optimizer the rate before its last jump. It decides nothing.

    A line with the rate alone does not show that the rate is the cause: a reader does not know the
    usual rate of the run. A step costs one comparison.
    """

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        """Engine -> rate of its newest step."""
        self._jumps: dict[str, tuple[int, float]] = {}
        """Engine -> step of its last jump, and the rate before."""

    def add(self, index: int, record: StepRecord) -> None:
        """Adds the rate of a step, with the engine's multiplier.

        Args:
            index: index of the step.
            record: its record. A rate of 0 or None is passed over.
        """
        if not record.lr:
            return
        rate = float(record.lr) * float(record.lr_scale)
        newest = self._newest.get(record.engine, rate)
        if rate >= _FACTOR * newest:
            self._jumps[record.engine] = index, newest
        self._newest[record.engine] = rate

    def rate_before(self, index: int, record: StepRecord) -> float | None:
        """The rate before the jump of a step's rate.

        Args:
            index: index of the step.
            record: its record, which was added.

        Returns:
            The rate, or None if the rate has not jumped in the last `JUMP_STEPS` steps, or has
            fallen again since.
        """
        jump = self._jumps.get(record.engine)
        if jump is None or not record.lr:
            return None
        step, before = jump
        rate = float(record.lr) * float(record.lr_scale)
        if index - step > JUMP_STEPS or rate < _FACTOR * before:
            return None
        return before
