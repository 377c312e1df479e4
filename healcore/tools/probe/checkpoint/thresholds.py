"""Everything that the checkpoint probe's verdict depends on, beside the checkpoints themselves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CheckpointInputs(BaseModel):
    """Inputs of the checkpoint probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonfinite_ok: tuple[str, ...] = ()
    """Patterns of array names (`model.*.mask`) where NaN and Inf are meant."""
    step: int | None = Field(default=None, ge=0)
    """Only the checkpoint of this step."""
    require_good: bool = False
    """FAIL where there is no known-good checkpoint, SKIP where nobody can know."""
    deep: bool = False
    """Look at every number again, also where digests say that it is what was checked when saved."""
