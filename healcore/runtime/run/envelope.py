"""`Envelope`: what the run is held in while it repeats steps, and after them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic import ConfigDict

from healcore.runtime.data import BatchId
from healcore.runtime.driver import NumberRange

T = TypeVar("T")

SavedRate: TypeAlias = dict[str, Any]
"""The learning-rate part of an engine state: multiplier, ceiling and cuts, as JSON-safe values."""


class Held(NamedTuple):
    """A number of an optimizer that is held in its healthy range.

    The optimizer uses a healthy number instead of the number that the program sets, until the
    program sets a number within the range again.
    """

    bounds: NumberRange
    """Lowest and highest healthy value, and the value that is held."""
    outside: float | None
    """The value of the program that was outside; None for NaN and Inf."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What the run is held in. It is empty, and false, most of the time.

    A value that never changes: undoing is taking the older value. Checkpoints hold it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    rates: dict[str, SavedRate] = field(default_factory=dict)
    """Engine name -> its multiplier and the ceiling of its learning rate when the envelope was
    taken. Engines without an entry keep what they have."""
    is_guess: bool = False
    """Whether the ceilings are a guess, because no healthy rate was known at the start of the run.
    They then end at the first healthy checkpoint."""
    numbers: dict[str, Held] = field(default_factory=dict)
    """Name, see `Driver.numbers` -> the number."""
    norms: dict[str, float] = field(default_factory=dict)
    """Engine name -> the limit of its gradient norm. A norm leaves its range at single steps, so
    its limit stays: larger gradients are scaled down before the update, as by clipping."""
    left_out: tuple[BatchId, ...] = ()
    """Batches that are not read."""
    frozen: tuple[int, int] | None = None
    """First and last frozen step, or None. A frozen step computes its gradient and changes no
    weights: the gradient is wrong, and nothing shows where."""

    def __bool__(self) -> bool:
        return bool(self.numbers or self.norms or self.left_out or self.frozen)

    def joined(self, newer: Envelope) -> Envelope:
        """What both hold. Where both hold a name, the older bounds and limits (`self`) stay."""
        return Envelope(
            rates=self.rates,
            is_guess=self.is_guess or newer.is_guess,
            numbers=newer.numbers | self.numbers,
            norms=newer.norms | self.norms,
            left_out=tuple(dict.fromkeys(self.left_out + newer.left_out)),
            frozen=newer.frozen or self.frozen,
        )

    def beyond(self, older: Envelope) -> Envelope:
        """What `older` does not hold yet, without the rates."""
        return Envelope(
            numbers=_without(self.numbers, older.numbers),
            norms=_without(self.norms, older.norms),
            left_out=tuple(each for each in self.left_out if each not in older.left_out),
            frozen=None if self.frozen == older.frozen else self.frozen,
        )

    def without_numbers(self, names: Collection[str]) -> Envelope:
        """A copy without the numbers of some names."""
        return replace(self, numbers=_without(self.numbers, names))

    def freezes(self, step: int) -> bool:
        """Whether a step is frozen."""
        return self.frozen is not None and self.frozen[0] <= step <= self.frozen[1]

    def sentences(self) -> list[str]:
        """What is held and where, for the line and the report of a rollback.

        Returns:
            One sentence for each number and norm: "momentum held at 0.9, the program sets 0.1".
        """
        lines = []
        for name, each in self.numbers.items():
            if each.outside is None:
                program = "NaN or Inf"
            else:
                program = f"{each.outside:.4g}"
            lines.append(f"{name} held at {each.bounds.last:.4g}, the program sets {program}")
        for name, limit in self.norms.items():
            if name:
                of = f' of "{name}"'
            else:
                of = ""
            lines.append(f"gradient norm{of} kept below {limit:.4g}")
        if self.frozen is not None:
            first, last = self.frozen
            lines.append(f"steps {first} to {last} are frozen: they change no weights")
        return lines


def _without(held: dict[str, T], names: Collection[str]) -> dict[str, T]:
    """What is held under other names."""
    return {name: each for name, each in held.items() if name not in names}
