"""`WarmUp`: how long a loop over `Healer.steps` may run without an optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.runtime.driver import WEIGHTS
from healcore.runtime.run.ending.exits import IncompleteRun

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MAX_ITERATIONS = 1000
"""Iterations of a loop without a step after which a run that trains ends with an error. No gradient
accumulation is as long."""


class WarmUp:
    """Counts the iterations of one loop over `Healer.steps` that took no optimizer step.

    Such an iteration gets the same number again. A loop may need many of them before its first
    step, for example to fill a replay buffer. But a program whose steps the Healer does not see
    would get the same number forever, and would never end. So the count has a limit:

        before the first step of the loop    `warmup` of the caller, by default the steps of the
                                             loop and at least `MAX_ITERATIONS`
        after the first step or a rollback   `MAX_ITERATIONS`
    """

    def __init__(self, run: Run, total: int, warmup: int | None) -> None:
        """Begins to count for one loop.

        Args:
            run: the run, whose number of steps shows whether an iteration took one.
            total: number of optimizer steps at which the loop ends.
            warmup: iterations that the caller allows before the first step, or None for the
                default.
        """
        self.run = run
        self._allowed = max(MAX_ITERATIONS, total)
        if warmup is not None:
            self._allowed = warmup
        self._iterations = 0  # in a row without a step
        self._step = -1  # at the last call of `count`, or -1 before
        self._first_step = -1  # at the first call of `count`, or -1 before
        self._weights = ""
        """Digest of the weights in the middle of a long wait for a step."""

    def count(self, *, rolled_back: bool) -> None:
        """Counts an iteration, unless it took a step.

        Args:
            rolled_back: whether the run was rolled back since the last call. The number of the step
                may be the same then, although the program has stepped.

        Raises:
            IncompleteRun: the loop took no step in as many iterations as are allowed, or the
                weights change without a step that the Healer sees.
        """
        step = self.run.data.step
        if step == self._step and not rolled_back:
            self._iterations += 1
        else:
            self._iterations = 0
        self._step = step
        if self._first_step < 0:
            self._first_step = step
        if step != self._first_step or rolled_back:
            self._allowed = MAX_ITERATIONS
        if self._iterations:  # most iterations take a step
            self._check()

    def _check(self) -> None:
        """Raises IncompleteRun after too many iterations, and announces this end in the log."""
        iterations = self._iterations
        is_long = iterations in (MAX_ITERATIONS // 2, MAX_ITERATIONS)
        if is_long and self.run.driver.state_is_in_place:
            before = self._weights
            self._weights = self.run.driver.settings()[WEIGHTS]
            if iterations == MAX_ITERATIONS and before != self._weights:
                raise IncompleteRun(
                    f"healcore: the weights change, and the Healer has seen no step in "
                    f"{iterations} iterations of healer.steps: the state needs the optimizer whose "
                    "step() the loop calls"
                )
        if iterations > self._allowed:
            raise IncompleteRun(
                f"healcore: step {self._step} was not taken in {self._allowed} iterations of "
                "healer.steps: for a longer warm-up write healer.steps(n, warmup=iterations), and "
                "a loop with fewer steps calls healer.after_step()"
            )
        if iterations == MAX_ITERATIONS + 1:
            self.run.log.info(
                f"step {self._step}: {MAX_ITERATIONS} iterations without an optimizer step, as in "
                f"a warm-up; after {self._allowed} of them the run ends with an error"
            )
