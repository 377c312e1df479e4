"""`ComparisonState`: what a checkpoint holds of the comparisons of weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ConfigDict

from healcore.runtime.run.compare.evidence import Anchor
from healcore.runtime.run.trouble import Trouble


@dataclass
class ComparisonState:
    """What a checkpoint holds of the comparisons: the anchors, and the current suspicion.

    A restart in the middle of a suspicion continues it with the evidence so far. Without that, a
    run that is killed often would never collect enough evidence for a rollback.

    A run has one such object. A resume changes its fields, so that each part can keep the object.
    Each field has one owner, which changes it in the course of the run:

        anchors                             `Comparisons`, which adds, compares and drops them.
                                            `Suspicion` lowers the evidence of a verdict that waits.
        first_losses, silent_until,         `Comparisons`
        mean_quiet_until
        bursts, verdict                     `Suspicion`
        the fields "in a record"            nobody: `Comparisons.to_save` sets them in a copy

    The end of a suspicion changes fields of several owners, see `Comparisons.forget_trouble`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    anchors: list[Anchor] = field(default_factory=list)
    """At most `MAX_ANCHORS`, oldest first: the weights with the lowest mean loss when they were
    copied, and the weights at the last two checkpoints. The first weights of a process have no
    mean: they stay for two checkpoints, and for as long as they have evidence."""
    bursts: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of the latest bursts of steps with an alarm or a loss above the usual
    losses. The gaps within a burst have at most `STEPS_AFTER_SIGN` steps."""
    first_losses: list[float] = field(default_factory=list)
    """The first `RECENT` finite losses of the run."""
    verdict: Trouble | None = None
    """The pending verdict, until the run rolls back or recovers, or None."""
    silent_until: int = 0
    """Step before which weights are neither compared nor copied."""
    mean_quiet_until: int = 0
    """Step before which a high mean loss is no reason to compare."""
    gives_loss: bool = False
    """`LossFunction.gives_loss`, in a record."""
    credit: float | None = None
    """`Credit.left`, in a record."""
    usual: list[float] = field(default_factory=list)
    """`LossLevel.usual`, in a record."""
    recent: list[float] = field(default_factory=list)
    """`LossLevel.recent`, in a record."""

    @property
    def has_evidence(self) -> bool:
        """Whether an anchor has evidence, or a verdict is pending."""
        return self.verdict is not None or any(anchor.evidence > 1 for anchor in self.anchors)

    def anchor_of(self, step: int | None) -> Anchor | None:
        """The anchor of a step, or None if its weights are not kept.

        Args:
            step: step of the checkpoint at which the weights were copied.

        Returns:
            The anchor, which `anchors` holds too.
        """
        for anchor in self.anchors:
            if anchor.step == step:
                return anchor
        return None
