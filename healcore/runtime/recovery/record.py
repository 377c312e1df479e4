"""`Record`: what a restart has to know of a run, in the healing state of each checkpoint.

A rollback replaces the record of the checkpoint that it restores. So a restart finds the budgets,
the learning-rate multiplier and the skipped batches in the checkpoint from which it resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from healcore.runtime.dominance.anchor import ComparisonState
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.store import Course, StoreError

SCHEMA = 3
_Step = Annotated[int, Field(ge=0)]
_Loader = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
_BatchId = Annotated[list[_Step], Field(min_length=2, max_length=2)]


@dataclass(kw_only=True)
class Record:
    """The facts of a run after some step."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    run: str = ""
    """Id of the run's first process."""
    first_step: _Step = 0
    """Step of the run's first snapshot."""
    attempts: list[_Step] = field(default_factory=list)
    """See `Course`."""
    proven: int = -1
    """See `Course`."""
    completed: bool = False
    """Whether the program had reached its end."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Learning rate, batch size, policy and other settings of the start, see `run_settings`."""
    nonfinite_ok: list[str] = field(default_factory=list)
    """Names of arrays that were not finite in the first snapshot."""
    part_limit: Annotated[int, Field(ge=1)] | None = None
    """Largest number of samples of a micro-batch, or None while all batches have fitted."""
    shrinks: _Step = 0
    """How often the micro-batches were halved after running out of memory."""
    passes: _Step = 0
    """Most calls of `batches` in a process of the run."""

    # -- at the step of the checkpoint
    step: _Step = 0
    world: Annotated[int, Field(ge=1)] = 1
    """Number of ranks."""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> `Engine.to_dict`."""
    ledger: Ledger = field(default_factory=Ledger)
    left_out: dict[_Loader, list[_BatchId]] = field(default_factory=dict)
    """Number of a loader -> ids of the batches that the loader skips."""
    forward: dict[_Loader, dict[str, Any]] = field(default_factory=dict)
    """Number of a loader that cannot be rewound -> its position, which a rollback keeps."""
    comparisons: ComparisonState | None = None
    """The comparisons of weights, or None without a `loss_fn`."""

    @property
    def course(self) -> Course:
        """The attempts of the run, and the step up to which checkpoints are known-good."""
        return Course(tuple(self.attempts), self.proven)

    def repeats(self, step: int) -> bool:
        """Whether the last rollback undid the steps from `step` on."""
        return bool(self.ledger.rollbacks) and self.ledger.rollbacks[-1].target >= step

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        return {**asdict(self), "schema": SCHEMA}


_RECORD = TypeAdapter(Record)


def read(healing: Mapping[str, Any]) -> Record:
    """Inverse of `to_dict`. Raises StoreError or ValueError for other values."""
    content = dict(healing)
    if content.pop("schema", None) != SCHEMA:
        raise StoreError("it is of another version of healcore: resume with that version")
    return _RECORD.validate_json(json.dumps(content), strict=True)
