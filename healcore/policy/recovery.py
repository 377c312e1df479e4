"""Tables for how a run recovers, and how often.

`[rollback]` and `[budget]` add keys of the host to the engine's. `[retry]`, `[skip_batch]` and
`[hang]` are for faults, which only the host detects.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from healcore.core.engine import BudgetConfig, RollbackConfig
from healcore.core.ranges import (
    OnOff,
    Positive,
    Ratio,
    Steps,
    StepsOrZero,
    number,
    one_of,
    whole,
)

_rollback, _budget = RollbackConfig(), BudgetConfig()
_Few = Annotated[int, whole(0, 1000)]


class Rollback(NamedTuple):
    """Which checkpoint a rollback restores, and under which conditions."""

    depth: Annotated[int, whole(1, 1000)] = _rollback.depth
    deepen: _Few = _rollback.deepen
    region: StepsOrZero = _rollback.region
    probation: Steps = 100
    """Healthy steps after a checkpoint until the checkpoint counts as known-good."""
    skip_batches: StepsOrZero = 0
    """Batches that a rollback skips after the batches of the incident."""
    confirm: OnOff = False
    """A rollback needs evidence: weights that are not finite, or earlier weights that are
    better. An order without evidence is declined and does not use the budget. The `Healer` itself
    applies the rules that roll back for NaN and Inf: only it can look at the weights."""
    evidence: Annotated[float, number(least=10)] = 1e4
    """With a `loss_fn`: lower bound of the mean number of comparisons per false rollback."""
    nonfinite_state: Annotated[str, one_of("alert", "rollback", "stop")] = "rollback"
    """Response to a save that finds NaN or Inf in weights, moments or other saved arrays,
    although no step raised an alarm. Arrays in `nonfinite_ok` are not checked."""
    reset_moments: OnOff = False
    """A rollback also resets the optimizer's moments and the counters of their bias correction."""


class Budget(NamedTuple):
    """How often a run may recover; when exhausted, a non-finite step stops the run."""

    recoveries: _Few = _budget.recoveries
    lr_cuts: _Few = _budget.lr_cuts
    shrinks: _Few = 6
    """Halvings of a micro-batch that does not fit into memory."""
    refund_after: Steps = _budget.refund_after


class Retry(NamedTuple):
    """`[retry]`: how a failed network call is repeated.

    The wait after attempt n is `base_delay_s * factor ** (n - 1)`, at most `max_delay_s`. A random
    part of up to the share `jitter` is subtracted, so that many processes do not retry at once.
    """

    base_delay_s: Positive = 1.0
    """Seconds before the second attempt."""
    factor: Ratio = 2.0
    """Ratio of each wait to the previous wait."""
    max_delay_s: Positive = 60.0
    """Longest wait in seconds."""
    jitter: Annotated[float, number(least=0, most=1)] = 0.5
    """Random share of a wait, so that many processes do not retry at once."""
    attempts: Annotated[int, whole(1, 1000)] = 8
    """Attempts in total; then the last error is raised."""

    AT_MOST = (("base_delay_s", "max_delay_s"),)


class Hang(NamedTuple):
    """`[hang]`: after which time a step counts as hung.

    The limit is at least three times the longest step so far.
    """

    timeout_s: Positive = 300.0
    """Seconds for one step, or for one batch to arrive."""
    first_step_s: Positive = 7200.0
    """The same for the first step of a process, which compiles; at least `timeout_s`."""
    between_steps: OnOff = False
    """Whether the time between the optimizer's step and the next batch counts too, for example
    your evaluation, your checkpoints, or `loss.item()`."""


class SkipBatch(NamedTuple):
    """`[skip_batch]`: how many unreadable batches are skipped before the error is raised."""

    consecutive: Annotated[int, whole(1, 1000)] = 3
    """Unreadable batches in a row that may be skipped."""
    count: Annotated[int, whole(1, 100_000)] = 10
    """Unreadable batches among the last `within` that may be skipped."""
    within: Steps = 1000
    """Length of the window for `count`, in batches."""

    AT_MOST = (("consecutive", "count"), ("count", "within"))
