"""What the demo sets differently from a training run, because it is so short."""

from __future__ import annotations

from healcore.policy import Policy

PROBATION = 20
"""Healthy steps after which a checkpoint is known-good; the presets take 100, a third of a run."""
SAVE_EVERY = 10
"""Steps between two checkpoints."""


def shortened(policy: Policy) -> Policy:
    """The policy with a probation that fits in a short run. Nothing else of it is changed."""
    rollback = policy.rollback
    probation = min(rollback.probation, PROBATION)
    return policy.model_copy(
        update={"rollback": rollback.model_copy(update={"probation": probation})}
    )
