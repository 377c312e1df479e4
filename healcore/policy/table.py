"""Defines `Table`: a table of a policy file, frozen, strict, with the fields of a core config."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from healcore.policy.values import to_float32


class Conflict(NamedTuple):
    """Two values of one table that exclude each other."""

    path: tuple[str | int, ...]
    """Path from the table to the value that the message names."""
    value: Any
    rule: str
    write: str


class AtMost(NamedTuple):
    """A rule of a table: the value of `key` is at most that of `limit`, which may be dotted."""

    key: str
    limit: str
    more: str
    """What `limit` would have to be instead: "longer", "larger"."""
    why: str = ""

    def conflict(self, table: Table) -> Conflict | None:
        """The conflict if a table breaks the rule."""
        value, most = getattr(table, self.key), attrgetter(self.limit)(table)
        if value <= most:
            return None
        rule = f"at most {self.limit}, which is {most}" + (f": {self.why}" if self.why else "")
        write = f"{self.key} = {most}, or a {self.more} {self.limit}"
        return Conflict((self.key,), value, rule, write)


class Table(BaseModel):
    """Base of all tables.

    A subclass names the core's NamedTuple in `core` and has the same fields and defaults in any
    order (checked by tests/policy/test_schema.py), besides those in `host_only`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    core: ClassVar[type | None] = None
    host_only: ClassVar[frozenset[str]] = frozenset()
    """Keys that only the host reads; the engine on the device does not have them."""
    at_most: ClassVar[tuple[AtMost, ...]] = ()

    def conflicts(self) -> Iterator[Conflict]:
        """Yields the conflicts between values; a subclass may add rules to `at_most`."""
        yield from filter(None, (rule.conflict(self) for rule in self.at_most))

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
