"""`TrainingReport`: what healcore saw and did in one `train()` call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from healcore.torch.healing import Report


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """What was seen and done. `str()` gives it as lines to print, `to_dict()` as JSON-safe values.

    Counts are those of the whole run, earlier processes included.
    """

    policy: str
    steps: int
    """The Trainer's global_step."""
    skipped: int
    """Optimizer steps that were left out."""
    clipped: int
    """Optimizer steps whose gradients the policy scaled down."""
    incidents: int
    lr_scale: float
    """What the learning rate is multiplied by; 1: the schedule as it is."""
    lr_cuts: int
    not_carried_out: int
    """Rollbacks that the policy ordered and a callback cannot do."""
    last_good: int | None
    """Step of the newest known-good checkpoint; None: there is none."""
    quarantined: tuple[int, ...]
    """Steps of the checkpoints that were moved to `_healcore`."""
    ending: str
    """completed, stopped, exception or interrupted; "": the training goes on."""
    postmortem: str | None
    """The file that says how the run ended, where something happened."""
    optimizer: Report
    """How the optimizer is healed, and what that costs."""

    def to_dict(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        return asdict(self)

    def __str__(self) -> str:
        good = "none yet" if self.last_good is None else f"step {self.last_good}"
        lines = [
            f"policy  {self.policy}, {self.ending or 'running'} at step {self.steps}",
            f"steps   {self.skipped} skipped, {self.clipped} clipped; {self.incidents} incidents",
            f"lr      × {self.lr_scale:g} after {self.lr_cuts} cuts",
            f"good    newest known-good checkpoint: {good}",
        ]
        if self.quarantined:
            lines.append(f"bad     quarantined {', '.join(map(str, self.quarantined))}")
        if self.not_carried_out:
            lines.append(f"orders  {self.not_carried_out} rollbacks, which a callback cannot do")
        if self.postmortem:
            lines.append(f"details {self.postmortem}")
        return "\n".join([*lines, str(self.optimizer)])
