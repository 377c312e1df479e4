"""Everything that the loss probe's verdict depends on, beside the curve itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from healcore.tools.probe.loss.events import POINTS, SIGMAS
from healcore.tools.probe.verdict import ProbeError


class LossInputs(BaseModel):
    """Inputs of the loss probe; the defaults pass healthy runs, however noisy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    signal: Literal["loss", "eval_loss", "grad_norm", "update_norm"] = "loss"
    goal: Literal["down", "up"] = "down"
    """`up` for a reward or an accuracy."""
    min_steps: int = Field(default=10, ge=4)
    """With fewer finite values nothing is said of the curve."""
    ends: float = Field(default=0.05, gt=0, le=0.5)
    """How much of the curve one end is, of which the median is taken; at least 3 values."""
    max_final_loss: float | None = None
    """FAIL above (with goal `up`: below)."""
    max_convergence_ratio: float = Field(default=1.0, gt=0)
    """WARN if the end divided by the start is above. Only of losses above 0."""
    min_smoothness: float = Field(default=-2.0, le=1)
    """WARN below. Noise around a level has -1; values that alternate have -3."""
    trend_sigmas: float = Field(default=3.0, gt=0)
    """A rise or a fall counts from this many standard deviations."""
    warn_regret: float = Field(default=0.1, ge=0)
    """WARN if the end has lost this part of the way from the start to the best again."""
    fail_regret: float = Field(default=0.5, ge=0)
    event_sigmas: float = Field(default=SIGMAS, gt=0)
    """Height of an instability event over the values before it."""
    event_points: int = Field(default=POINTS, ge=1)
    """Of five values in a row so many must be that high; fewer are a jump, which is only told."""
    max_events: int = Field(default=0, ge=0)
    """WARN if there are more."""
    max_nonfinite: int = Field(default=0, ge=0)
    """WARN if more values are NaN or Inf. A curve that ends in them fails."""
    curve_points: int = Field(default=512, ge=8, le=100_000)
    """Of the curve in the JSON output. The extremes are among them."""

    @model_validator(mode="after")
    def _ordered(self) -> LossInputs:
        if self.fail_regret < self.warn_regret:
            raise ProbeError(
                f"fail_regret is {self.fail_regret}, below warn_regret {self.warn_regret}: "
                "pass the larger one as fail_regret"
            )
        if self.event_points > 5:
            raise ProbeError(
                f"event_points is at most 5, of five in a row; not {self.event_points}"
            )
        return self
