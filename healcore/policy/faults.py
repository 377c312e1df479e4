"""Rules for faults, which only the host sees: exceptions, and steps that never return.

`[[respond]]` names them next to the causes that detectors find. No step is judged for them, so they
are no part of the engine: `Policy.config` leaves these rules out, and the runtime carries them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from healcore.core.verdict import Cause
from healcore.policy.table import AtMost, Conflict, Table
from healcore.policy.values import Number, OnOff, Positive, Ratio, Steps, Whole

FAULTS: dict[str, tuple[Cause, tuple[str, ...]]] = {
    "oom": (Cause.OOM, ("shrink_microbatch", "clear_cache", "save")),
    "data": (Cause.DATA, ("skip_batch", "save")),
    "network": (Cause.NETWORK, ("retry", "save")),
    "hang": (Cause.HANG, ("alert", "stop")),
    "unknown": (Cause.UNKNOWN, ("save",)),
}
"""The faults that `to` may name: the flag, and what `do` may answer. Each is logged in any case."""

FAULT_ACTIONS = tuple(dict.fromkeys(name for _, names in FAULTS.values() for name in names))
"""All actions that a rule for faults may name in `do`."""


class Retry(Table):
    """`[retry]`: how a failed network call is repeated.

    The wait after attempt n is `base_delay_s * factor ** (n - 1)`, at most `max_delay_s`, less a
    random part of up to `jitter` of it, so that many processes do not come back at once.
    """

    base_delay_s: Positive = 1.0
    factor: Ratio = 2.0
    max_delay_s: Positive = 60.0
    jitter: Annotated[float, Number(least=0, most=1)] = 0.5
    attempts: Annotated[int, Whole(least=1, most=1000)] = 8

    def conflicts(self) -> Iterator[Conflict]:
        """The first wait is within the limit."""
        if self.max_delay_s < self.base_delay_s:
            yield Conflict(
                ("max_delay_s",),
                self.max_delay_s,
                f"at least base_delay_s, which is {self.base_delay_s}",
                f"max_delay_s = {self.base_delay_s}, or a shorter base_delay_s",
            )


class Hang(Table):
    """`[hang]`: when a step counts as one that never returns.

    The limit grows with the run: it is at least three times the longest step so far.
    """

    timeout_s: Positive = 300.0
    first_step_s: Positive = 7200.0
    between_steps: OnOff = False


class SkipBatch(Table):
    """`[skip_batch]`: how many unreadable batches are left out until the error ends the run."""

    at_most = (AtMost("consecutive", "count", "larger"), AtMost("count", "within", "larger"))

    consecutive: Annotated[int, Whole(least=1, most=1000)] = 3
    count: Annotated[int, Whole(least=1, most=100_000)] = 10
    within: Steps = 1000
