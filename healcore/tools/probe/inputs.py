"""Inputs of the probes; each field is an option of `healcore probe`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from healcore import regular_file
from healcore.plugins.checkpoint_contents import ProbeError

_MAX_SPEC_BYTES = 1 << 20
EVENT_SIGMAS = 5.0
LossCheck = Literal[
    "finite",
    "final_loss",
    "progress",
    "convergence_ratio",
    "regret",
    "smoothness",
    "instability_events",
    "gradient_norm",
    "zero_loss",
    "eval_loss",
]
LOSS_CHECKS: tuple[str, ...] = get_args(LossCheck)


def read_spec(path: Path) -> dict[str, Any]:
    """Reads the inputs of a probe from a TOML file. Raises ProbeError if that fails."""
    try:
        return tomllib.loads(regular_file.read(path, _MAX_SPEC_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProbeError(f"{path} cannot be read as a TOML spec: {reason}") from None


class LossInputs(BaseModel):
    """Inputs of the loss probe. The defaults pass healthy runs with any noise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_steps: int = Field(
        default=10, ge=4, description="A curve with fewer finite values is not judged."
    )
    max_final_loss: float | None = Field(
        default=None, description="FAIL if the end is larger; no bound by default."
    )
    # Checked only for losses above 0.
    max_convergence_ratio: float = Field(
        default=1.0, gt=0, description="WARN if end / start is larger."
    )
    # A curve that alternates between two values has -3.
    min_smoothness: float = Field(
        default=-2.0, le=1, description="WARN if the smoothness is lower; pure noise has -1."
    )
    trend_sigmas: float = Field(
        default=3.0, gt=0, description="Standard deviations from which a rise or fall counts."
    )
    warn_regret: float = Field(
        default=0.1, ge=0, description="WARN if a larger fraction of the improvement is lost."
    )
    fail_regret: float = Field(default=0.5, ge=0, description="FAIL if a larger fraction is lost.")
    event_sigmas: float = Field(
        default=EVENT_SIGMAS,
        gt=0,
        description="Smallest height of an instability event, in noise units.",
    )
    rolling_window: int = Field(
        default=16,
        ge=4,
        le=1000,
        description="Number of preceding values whose median is the level of a value.",
    )
    max_events: int = Field(default=0, ge=0, description="WARN if there are more events.")
    # A curve that ends in NaN or Inf always fails.
    max_nonfinite: int = Field(default=0, ge=0, description="WARN if more values are NaN or Inf.")
    weights: dict[LossCheck, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="Weight of each check in the score; the default is 1."
    )

    @model_validator(mode="after")
    def _ordered(self) -> LossInputs:
        if self.fail_regret < self.warn_regret:
            raise ProbeError(
                f"fail_regret is {self.fail_regret}, below warn_regret {self.warn_regret}: "
                "pass the larger one as fail_regret"
            )
        return self


class OptimizerInputs(BaseModel):
    """Inputs of the optimizer probe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step: int | None = Field(
        default=None,
        ge=0,
        description="Checkpoint of a store; by default the newest known-good checkpoint.",
    )
    min_step: int = Field(default=50, ge=1, description="Moments before this step are not judged.")
    global_step: int | None = Field(
        default=None, ge=0, description="Training step, if the state does not contain it."
    )
    fail_young: bool = Field(
        default=False, description="FAIL instead of SKIP before --min-step, or without a step."
    )
    fail_nonfinite: int = Field(
        default=2,
        ge=1,
        description="FAIL if at least this many parameters have NaN; WARN if fewer.",
    )
    # A parameter is dead if all its second moments are exactly 0.
    fail_dead: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="FAIL if a larger fraction of layers is dead; WARN if any layer is.",
    )
    # In robust standard deviations of log v-hat.
    outlier_sigmas: float = Field(
        default=5.0, gt=0, description="Smallest distance of an outlier from similar parameters."
    )
    # The first and last layers of healthy networks reach a factor of about 30.
    outlier_ratio: float = Field(
        default=50.0, ge=1, description="Smallest factor between an outlier and similar parameters."
    )
    fail_outliers: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="FAIL if a larger fraction of layers is outliers; WARN if any layer is.",
    )
    top: int = Field(default=3, ge=1, description="Number of layers to list.")


class CheckpointInputs(BaseModel):
    """Inputs of the checkpoint probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int | None = Field(default=None, ge=0, description="Only this checkpoint of a store.")
    # Patterns such as `model.*.mask`.
    nonfinite_ok: tuple[str, ...] = Field(
        default=(),
        description="Name or pattern of arrays that may hold NaN and Inf; may be repeated.",
    )
    # FAIL without a known-good checkpoint; SKIP if the format does not record it.
    require_good: bool = Field(default=False, description="Pass only with a known-good checkpoint.")
