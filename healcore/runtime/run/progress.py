"""`RunProgress`: how far the run has come, and where this process has begun."""

from __future__ import annotations

from dataclasses import dataclass, field

from healcore.core.errors import HealcoreError


@dataclass
class RunProgress:
    r"""The number of steps of a run, and what this process has done of them.

        earlier process      this process
        |------------------->|---------------->
        0                    resume            step
                              \_ steps_taken _/

    `step` also changes by `DispatchQueue.take_count_correction`, where a dispatch turns out to have
    had another number of steps than its driver had announced.
    """

    step: int = 0
    """Steps done, which is the index of the next step. A rollback decreases the number."""
    steps_taken: int = 0
    """Steps of this process, including steps that a rollback has undone."""
    had_completed: bool = False
    """Whether the run in the store had completed, and this process has its last state."""
    reading_error: HealcoreError | None = None
    """Error of the program that the reading of a step has shown, such as a step from
    an older state in JAX, or None. Nothing is saved after it."""
    _has_resumed: bool = field(default=False, init=False)
    """Whether this process continues at an earlier process's checkpoint."""

    def resume(self, step: int, *, completed: bool) -> None:
        """Continues at an earlier process's checkpoint.

        Args:
            step: step of the checkpoint.
            completed: whether the run had ended with this checkpoint.
        """
        self._has_resumed = True
        self.had_completed = completed
        self.step = step

    def count(self, steps: int) -> None:
        """Counts steps that the program has just taken.

        Args:
            steps: number of steps of the dispatch.
        """
        self.step += steps
        self.steps_taken += steps

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed a run and taken no step since.

        An empty loop is normal then: the run may have been complete, and nothing is left to train.
        Without a resume, a loop that takes no step is an error of the program.
        """
        return self._has_resumed and not self.steps_taken
