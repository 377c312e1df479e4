"""Everything that the optimizer probe's verdict depends on, beside the state itself."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class OptimizerInputs(BaseModel):
    """Inputs of the optimizer probe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_step: int = Field(default=50, ge=1)
    """Before it second moments are an average of too little to be judged."""
    global_step: int | None = Field(default=None, ge=0)
    """The step of the state, where the state does not say it."""
    step: int | None = Field(default=None, ge=0)
    """Which checkpoint of a store; the newest known-good one if None."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """For the bias correction, where the state does not say it: optax keeps it in the code."""
    fail_nonfinite: int = Field(default=2, ge=1)
    """FAIL if the moments of so many parameters hold NaN or Inf; fewer warn."""
    fail_dead: float = Field(default=0.3, ge=0, le=1)
    """FAIL if more than this part of the layers has second moments of exactly 0; fewer warn."""
    outlier_sigmas: float = Field(default=5.0, gt=0)
    """How far log v-hat may be from that of its like, in robust standard deviations."""
    outlier_ratio: float = Field(default=50.0, ge=1)
    """And at least by this factor: first and last layers of healthy nets reach about 30."""
    fail_outliers: float = Field(default=0.3, ge=0, le=1)
    """FAIL if more than this part of the layers are outliers; fewer warn."""
    top: int = Field(default=3, ge=1)
    """How many layers are named."""
