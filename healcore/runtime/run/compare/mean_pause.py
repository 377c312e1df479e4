"""`MeanPause`: how long a high mean loss is no reason to compare weights again."""

from __future__ import annotations

from dataclasses import dataclass

from healcore.runtime.run.compare.evidence import RECENT

FIRST_PAUSE = RECENT // 2
"""Steps of the first pause. By then, half of the losses of the mean are other losses."""

LONGEST_PAUSE = RECENT
"""Steps of the longest pause: a longer one would miss trouble that ends by itself."""


@dataclass
class MeanPause:
    """Pauses after comparisons because of a high mean loss that have found no evidence.

    A mean loss stays high for long where the data has become harder. Without the pauses, such a run
    would compare weights at every step, until its credit is used up. Each comparison without
    evidence doubles the next pause, up to `LONGEST_PAUSE` steps.
    """

    until: int = 0
    """Step before which a high mean loss is no reason to compare."""
    length: int = FIRST_PAUSE
    """Steps of the next pause."""

    def blocks(self, index: int) -> bool:
        """Whether a high mean loss at a step is no reason to compare.

        Args:
            index: number of the step, from 0.
        """
        return index < self.until

    def begin(self, index: int) -> None:
        """Begins a pause, because the comparison at a step has found no evidence.

        Args:
            index: number of the step.
        """
        self.until = index + self.length
        self.length = min(LONGEST_PAUSE, 2 * self.length)

    def reset(self, index: int) -> None:
        """Makes the next pause short again, because the mean loss of a step is not high.

        Args:
            index: number of the step. During a pause nothing is known of the mean loss, so the
                method does nothing.
        """
        if index > self.until:
            self.length = FIRST_PAUSE
