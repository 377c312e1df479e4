"""Numbers that follow from the constants of the comparisons."""

import math

from healcore.runtime.run.witness.evidence import STAKE
from healcore.runtime.run.witness.witness import (
    CREDIT_STEPS,
    MAX_SHARE,
    RESTART_POWER,
    STEP_COST,
)
from healcore.runtime.run_options import HostPolicy

PER_STEP = MAX_SHARE * STEP_COST
"""Evaluations that a step of a healthy run pays for: 1 % of a step that costs three."""
MAX_CREDIT = CREDIT_STEPS * PER_STEP
"""The most evaluations that a run can have saved up."""
THRESHOLD = HostPolicy.of("default").rollback.evidence
"""Evidence for a verdict: 10,000."""
TO_VERDICT = math.ceil(math.log(THRESHOLD, 1 + STAKE))
"""Comparisons in a row, all won by the earlier weights, until a verdict: 20."""
AGAIN = math.ceil(math.log(THRESHOLD / THRESHOLD**RESTART_POWER, 1 + STAKE))
"""Comparisons until a verdict that has waited is found again: 10."""
