"""`MissingRate`: notices that no learning rate reaches healcore.

In JAX a program passes the rate to `update` as `learning_rate=`, or has it in its state. A rollback
limits the rate to the last healthy rate if it knows the rate, and otherwise multiplies the rate by
a factor. A program that misspells the keyword would not notice the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from healcore.console import first_of
from healcore.core.step_record import StepRecord

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_STEPS = 5
"""Steps in which each optimizer that has stepped should have shown a rate."""


class MissingRate:
    """Warns once, after the first steps of a process, if the rate of an optimizer is unknown.

    Only a run that limits rates needs the warning: it has a `loss_fn`, and its policy limits rates
    after a rollback.

    Args:
        run: the parts of the run.

    Attributes:
        is_done: whether the first steps are over. Then no further step is needed.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_done = False
        self._steps = 0
        """Number of steps so far in which an optimizer has stepped. At most `_STEPS`."""
        self._unknown: dict[str, None] = {}  # a dict as an ordered set
        """Engines without a rate."""
        self._known: set[str] = set()
        """Engines with a rate."""

    def note_step(self, records: Sequence[StepRecord]) -> None:
        """Notes the rates of one of the first steps, and warns after the last of them.

        Args:
            records: the records of the step.
        """
        taken = [record for record in records if record.taken]
        for record in taken:
            if record.lr is None:
                self._unknown[record.engine] = None
            else:
                self._known.add(record.engine)
        if taken:
            self._steps += 1
        self.is_done = self._steps == _STEPS
        if self.is_done and self._needs_rates():
            self._warn()

    def _needs_rates(self) -> bool:
        """Whether a rollback of this run would read the rates."""
        run = self._run
        if run.driver.framework != "jax":  # every optimizer of torch has its rate
            return False
        if not run.comparisons.is_enabled:  # then the rate is limited after NaN only, if at all
            return False
        return run.policy.may_limit_lr and not run.policy.observes

    def _warn(self) -> None:
        missing = [name for name in self._unknown if name not in self._known]
        if not missing:
            return
        # The driver may find a rate in the optimizer that its engine has not received.
        rates = self._run.driver.learning_rates()
        missing = [name for name in missing if rates.get(name) is None]
        if not missing:
            return
        of = ""
        if len(rates) > 1:
            of = f" of {first_of(missing)}"
        factor = float(self._run.policy.engine.config.lr.factor)
        self._run.loop.warn(
            f"no learning rate{of} reaches healcore, so a rollback cannot limit it to the last "
            f"healthy rate, and can only multiply it by {factor:g}. Write tx.update(..., "
            "learning_rate=rate), with the rate of this step"
        )
