"""The errors of checkpoint stores. Live state is unchanged after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from healcore.core.errors import HealcoreError


class StoreError(HealcoreError, RuntimeError):
    """Base class of all errors of checkpoint stores."""


@dataclass(eq=False, repr=False)
class CheckpointDamaged(StoreError):
    """The bytes of a checkpoint are not the bytes that were saved. Use an older checkpoint."""

    step: int
    path: str
    """Directory of the checkpoint, or "memory"."""
    file: str
    """The file (or array) that differs, relative to `path`."""
    difference: str
    malformed: bool = False
    """The digests are right, but this version of healcore cannot read the content."""

    def _message(self) -> str:
        return (
            f"the checkpoint of step {self.step} is damaged: {self.file} {self.difference} "
            f"(in {self.path}); nothing was restored, use an older one"
        )


@dataclass(eq=False, repr=False)
class NotThere(StoreError):
    """The store has no complete checkpoint of that step."""

    step: int
    there: Sequence[int]
    where: str

    def _message(self) -> str:
        newest = ", ".join(str(step) for step in self.there[-5:]) or "none"
        more = "..., " if len(self.there) > 5 else ""
        return f"no complete checkpoint of step {self.step} in {self.where}; there: {more}{newest}"


class NoGoodCheckpoint(StoreError):
    """There is no checkpoint to roll back to."""


@dataclass(eq=False, repr=False)
class LastGoodKept(StoreError):
    """The last known-good checkpoint cannot be deleted."""

    step: int

    def _message(self) -> str:
        return (
            f"step {self.step} is the last known-good checkpoint and stays: mark a newer one good "
            "first, or remove its directory by hand"
        )


@dataclass(eq=False, repr=False)
class NotFinite(StoreError):
    """A checkpoint with non-finite arrays cannot be marked known-good."""

    step: int
    names: Sequence[str]

    def _message(self) -> str:
        shown = ", ".join(self.names[:5]) or "its arrays"
        more = f" and {len(self.names) - 5} more" if len(self.names) > 5 else ""
        return (
            f"step {self.step} holds NaN or Inf in {shown}{more} and "
            "cannot be known-good; where that is intended (a mask of -inf), name the array in the "
            "store's `nonfinite_ok`"
        )


@dataclass(eq=False, repr=False)
class SaveFailed(StoreError):
    """A checkpoint could not be copied or written. Earlier checkpoints are unchanged."""

    step: int
    doing: str
    error: BaseException
    hint: str = ""

    def _message(self) -> str:
        what = f"{type(self.error).__name__}: {self.error}"
        hint = f"; {self.hint}" if self.hint else ""
        return f"step {self.step} was not saved, {self.doing}: {what}{hint}"


@dataclass(eq=False, repr=False)
class StateMismatch(StoreError):
    """The checkpoint holds another state than the live state that it is restored into."""

    step: int | None
    differences: Sequence[str]
    where: str = ""

    def _message(self) -> str:
        shown = "; ".join(self.differences[:3])
        more = f"; and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
        which = "the saved state" if self.step is None else f"the checkpoint of step {self.step}"
        place, write = "", "Pass the state that the run was saved from"
        if self.where:
            place, write = f" in {self.where}", f"{write}, or an empty directory to begin a new run"
        return f"{which}{place} does not fit: {shown}{more}. {write}"


class UnsavableState(StoreError, TypeError):
    """The state holds a value that a checkpoint cannot hold."""


class Untrusted(StoreError):
    """The checkpoint holds something that could run code. Only `trust=True` reads it."""


def pickled(what: str, how: str) -> Untrusted:
    """The error for a pickle at `what` in the state; `how` names what takes `trust=True`."""
    return Untrusted(
        f"{what} is a pickled object, and reading one runs whatever code its writer put there: it "
        "was not read, and nothing was restored. If nobody but you could write to this directory, "
        f"pass trust=True to {how}"
    )


def no_plain_form(what: str, value: object, how: str) -> UnsavableState:
    """The error for a value at `what` that only pickle could write; `how` as in `pickled`."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return UnsavableState(
        f"{what} is a {name}, which has no plain form: keep arrays, "
        "numbers, strings, lists, tuples and dictionaries in the state, or give the object a "
        f"state_dict() that returns such. Or pass trust=True to {how}: it is pickled then, and "
        "reading it back needs trust=True too, in a directory that nobody else can write to"
    )
