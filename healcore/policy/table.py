"""A table of a policy file: frozen, strict, and equal field by field to a config of the core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from healcore.policy.values import to_float32


class Conflict(NamedTuple):
    """Two values of one table that exclude each other."""

    path: tuple[str | int, ...]
    """From the table to the value that is blamed."""
    value: Any
    rule: str
    write: str


class Table(BaseModel):
    """Base of all tables.

    A subclass names the core's NamedTuple in `core` and has the same fields and defaults in any
    order (checked by tests/policy/test_schema.py), besides those in `host_only`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    core: ClassVar[type | None] = None
    host_only: ClassVar[frozenset[str]] = frozenset()
    """Keys that steer the host (restoring), which the engine on the device has not."""

    def conflicts(self) -> Iterator[Conflict]:
        """Yields conflicts between fields; for subclasses."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Any:
        found = list(self.conflicts())
        if found:
            raise PydanticCustomError("conflict", "values that conflict", {"conflicts": found})
        return self

    def config(self) -> Any:
        """The core's config. Floats are rounded to float32 once, for all backends."""
        assert self.core is not None, f"{type(self).__name__} has no counterpart in the core"
        fields = self.core._fields  # type: ignore[attr-defined]
        return self.core(**{name: _to_core(getattr(self, name)) for name in fields})


def _to_core(value: Any) -> Any:
    if isinstance(value, Table):
        return value.config()
    if isinstance(value, float):
        return to_float32(value)
    return value
