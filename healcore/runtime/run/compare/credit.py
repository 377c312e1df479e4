"""`Credit`: bounds what comparisons of weights may cost a healthy run.

Each step earns a part of an evaluation, and a comparison is charged for the evaluations that it
makes. A run without credit compares only at the first alarm after a quiet time, and while there is
evidence.
"""

from __future__ import annotations

REGULAR_INTERVAL = 100
"""Steps between two regular comparisons, more if `loss_fn` is expensive. Also the number of last
losses that a loss has to exceed to be a sign of trouble."""
MAX_SHARE = 0.01
"""Max share of a healthy run's work that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
FORWARD_PASS = 1 / STEP_COST
"""Cost of an evaluation in training steps, unless the user states another one."""
CREDIT_STEPS = 1000
"""A run can save up the evaluations that it earns in this number of steps. It starts with them,
because a learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""


class Credit:
    """Credit of evaluations: comparisons may cost `MAX_SHARE` of the work of a healthy run.

    The price of an evaluation is a number of steps that the user may state. It is not measured:
    the same program makes the same comparisons on any machine, under any load.

    Args:
        cost: price of one evaluation of one batch, in training steps.

    Attributes:
        left: number of evaluations that the run may make. A debt is below 0.
    """

    def __init__(self, cost: float) -> None:
        self._per_step = MAX_SHARE / cost
        self._max = CREDIT_STEPS * self._per_step
        self._interval = REGULAR_INTERVAL * max(1, round(cost * STEP_COST))
        self.left = self._max

    def allow_one(self) -> None:
        """Allows one comparison, even to a run that is in debt.

        Called where a comparison cannot wait: at the first alarm after a quiet time, and after a
        burst of signs.
        """
        self.left = max(self.left, 1.0)

    def refill(self) -> None:
        """Grants the whole credit, as at the start of a run.

        Called when a suspicion ends. The debt of the decision about it must not delay the discovery
        of the next trouble.
        """
        self.left = self._max

    def after_step(self) -> None:
        """Adds the credit of one step, up to the max credit.

        The credit is the number of evaluations that cost `MAX_SHARE` of the work of a step, usually
        less than one. Called once for each step that is observed, whether or not weights are
        compared at it.
        """
        self.left = min(self._max, self.left + self._per_step)

    def is_regular(self, index: int) -> bool:
        """Whether step `index` has a regular comparison, which needs no sign of trouble.

        A regular comparison is due at every `REGULAR_INTERVAL`-th step, or less often if `loss_fn`
        costs more than a forward pass. Regular comparisons find damage that raises no alarm and no
        loss.

        Args:
            index: number of the step, from 0.
        """
        return index % self._interval == self._interval - 1

    def charge(self, evaluations: int) -> None:
        """Subtracts evaluations. The debt is bounded.

        Args:
            evaluations: number of evaluations of a batch. A suspicion may make debts, because it
                has to be decided; the healthy run then compares less until they are paid.
        """
        self.left = max(-MAX_DEBT, self.left - evaluations)
