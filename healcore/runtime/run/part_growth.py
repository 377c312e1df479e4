"""`PartGrowth`: when larger parts of a batch are tried again after memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

FIRST_WAIT = 100
"""Steps after memory ran out until larger parts are tried again."""

_Count = Annotated[int, Field(ge=0)]
_Size = Annotated[int, Field(ge=1)]


@dataclass
class PartGrowth:
    """When larger parts are tried, and what happens if they do not fit.

    Memory may run out in one step of thousands, because of one long sequence or of another program
    on the device. Parts that stay small after such a step cost time until the end of the run. So
    `wait` steps after memory ran out, a step begins with parts of twice the size. If they fit, the
    run keeps this size, and tries twice that after as many steps. If they do not, the step is
    repeated with the size that fits. If the larger size has lasted for fewer steps than the wait
    before it, the next wait is twice as long, so that a size that never fits costs few repeats.

    Every value depends on the number of the step, never on the clock. The values are part of the
    run's record, so a restart tries the same sizes in the same steps as a run that was not killed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    since: _Count = 0  # step at which the size has last changed or was last tried
    wait: _Count = FIRST_WAIT  # steps from `since` to the next trial
    smaller: _Size | None = None
    """Size before the last trial, which fits; or None if memory ran out since the last trial."""
    trying: bool = False  # whether `since` is a trial's step, whose end is not known yet
    smallest: _Size | None = None  # smallest size of the run, or None if memory never ran out

    def is_due(self, step: int) -> bool:
        """Whether larger parts may be tried at a step."""
        return not self.trying and step - self.since >= self.wait

    def postpone(self, step: int) -> None:
        """Postpones a trial from which nothing can be learnt at this step."""
        self.since = step

    def begin_trial(self, step: int, size: int) -> int:
        """Begins a trial at a step of a run with parts of `size`. Returns the size to try."""
        self.since, self.smaller, self.trying = step, size, True
        return 2 * size

    def ends_trial(self, step: int) -> bool:
        """Whether the trial is over at the begin of a step: its own step has fitted."""
        ended = self.trying and step != self.since
        self.trying = self.trying and not ended
        return ended

    def go_back(self, step: int) -> int:
        """Returns the size before the last trial, if a larger part has not fitted at a step."""
        assert self.smaller is not None
        has_lasted = step - self.since >= self.wait
        self.wait = FIRST_WAIT if has_lasted else 2 * self.wait
        size = self.smaller
        self.since, self.smaller, self.trying = step, None, False
        return size

    def shrink(self, step: int, size: int) -> None:
        """Notes that the run continues with smaller parts than before."""
        self.since, self.wait, self.smaller, self.trying = step, FIRST_WAIT, None, False
        self.smallest = size if self.smallest is None else min(size, self.smallest)

    def is_new(self, size: int) -> bool:
        """Whether a size is smaller than all sizes so far, so that it counts in the budget."""
        return self.smallest is None or size < self.smallest

    def on_rollback(self, step: int) -> None:
        """Counts the wait from the step to which the run was rolled back."""
        self.since = min(self.since, step)
