"""The thresholds of each probe. The commands make one option of each field and its description."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from healcore.plugins.checkpoint_contents import ProbeError

EVENT_SIGMAS, EVENT_POINTS = 5.0, 3


class LossInputs(BaseModel):
    """Inputs of the loss probe; the defaults pass healthy runs, however noisy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    signal: Literal["loss", "eval_loss", "grad_norm", "update_norm"] = Field(
        default="loss", description="loss, eval_loss, grad_norm or update_norm; loss if left out."
    )
    goal: Literal["down", "up"] = Field(
        default="down", description="down, or up for a reward or an accuracy; down if left out."
    )
    min_steps: int = Field(
        default=10, ge=4, description="Fewer finite values are too few to judge."
    )
    # An end has at least 3 values; its median is taken.
    ends: float = Field(
        default=0.05, gt=0, le=0.5, description="Part of the curve that one end is."
    )
    # With goal `up`, FAIL below.
    max_final_loss: float | None = Field(
        default=None, description="FAIL beyond; no bound if left out."
    )
    # Checked only for losses above 0.
    max_convergence_ratio: float = Field(
        default=1.0, gt=0, description="WARN if end / start is above."
    )
    # A curve that alternates between two values has -3.
    min_smoothness: float = Field(
        default=-2.0, le=1, description="WARN below; noise around a level has -1."
    )
    trend_sigmas: float = Field(
        default=3.0, gt=0, description="A rise or a fall counts from here on."
    )
    warn_regret: float = Field(
        default=0.1, ge=0, description="WARN if so much of the way is lost again."
    )
    fail_regret: float = Field(default=0.5, ge=0, description="FAIL if so much is.")
    event_sigmas: float = Field(
        default=EVENT_SIGMAS, gt=0, description="Height of an instability event."
    )
    # Fewer high values are a jump, which is reported but not counted as an event.
    event_points: int = Field(
        default=EVENT_POINTS, ge=1, description="Of 5 values so many are that high."
    )
    max_events: int = Field(default=0, ge=0, description="WARN if there are more.")
    # A curve that ends in NaN or Inf fails whatever the value.
    max_nonfinite: int = Field(default=0, ge=0, description="WARN if more values are NaN or Inf.")
    curve_points: int = Field(
        default=512, ge=8, le=100_000, description="Of the curve in the JSON, extremes kept."
    )

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


class OptimizerInputs(BaseModel):
    """Inputs of the optimizer probe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step: int | None = Field(
        default=None,
        ge=0,
        description="Which checkpoint of a store; the newest known-good one if left out.",
    )
    min_step: int = Field(default=50, ge=1, description="Before it moments cannot be judged.")
    global_step: int | None = Field(
        default=None, ge=0, description="The step, where the state does not hold it."
    )
    # For the bias correction; optax does not store it in the state.
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Where the state does not hold it.")
    fail_nonfinite: int = Field(
        default=2, ge=1, description="FAIL if so many parameters have NaN; fewer warn."
    )
    # A parameter is dead if all its second moments are exactly 0.
    fail_dead: float = Field(
        default=0.3, ge=0, le=1, description="FAIL if more of the layers are dead; fewer warn."
    )
    # In robust standard deviations of log v-hat.
    outlier_sigmas: float = Field(
        default=5.0, gt=0, description="How far an outlier is from its like."
    )
    # First and last layers of healthy nets reach about 30.
    outlier_ratio: float = Field(default=50.0, ge=1, description="And at least by this factor.")
    fail_outliers: float = Field(
        default=0.3, ge=0, le=1, description="FAIL if more of the layers are; fewer warn."
    )
    top: int = Field(default=3, ge=1, description="How many layers are named.")


class CheckpointInputs(BaseModel):
    """Inputs of the checkpoint probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int | None = Field(default=None, ge=0, description="Only this one of a store.")
    # Patterns of array names, as in `model.*.mask`.
    nonfinite_ok: tuple[str, ...] = Field(
        default=(), description="Arrays where NaN and Inf are meant; may be repeated."
    )
    # Without a known-good checkpoint FAIL, or SKIP where it is not recorded.
    require_good: bool = Field(
        default=False, description="Without a known-good one it does not pass."
    )
    deep: bool = Field(default=False, description="Look at every number, also where digests hold.")
