"""The errors of checkpoint stores. Live state is unchanged after each of them."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.core.errors import HealcoreError


class StoreError(HealcoreError, RuntimeError):
    """Base class of all errors of checkpoint stores."""


class CheckpointDamaged(StoreError):
    """A checkpoint whose bytes are not those that were saved. Use an older one.

    Attributes:
        step: the checkpoint's step.
        path: its directory, or "memory".
        file: the file (or array) that differs, relative to `path`.
        difference: what differs.
        malformed: the digests are right, but this version of healcore cannot read the content.
    """

    def __init__(
        self, step: int, path: str, file: str, difference: str, malformed: bool = False
    ) -> None:
        super().__init__(step, path, file, difference, malformed)
        self.step = step
        self.path = path
        self.file = file
        self.difference = difference
        self.malformed = malformed

    def _message(self) -> str:
        return (
            f"the checkpoint of step {self.step} is damaged: {self.file} {self.difference} "
            f"(in {self.path}); nothing was restored, use an older one"
        )


class NotThere(StoreError):
    """No complete checkpoint of that step in the store."""

    def __init__(self, step: int, there: Sequence[int], where: str) -> None:
        super().__init__(step, tuple(there), where)
        self.step = step
        self.there = tuple(there)
        self.where = where

    def _message(self) -> str:
        newest = ", ".join(str(step) for step in self.there[-5:]) or "none"
        more = "..., " if len(self.there) > 5 else ""
        return f"no complete checkpoint of step {self.step} in {self.where}; there: {more}{newest}"


class NoGoodCheckpoint(StoreError):
    """There is no checkpoint to go back to."""


class LastGoodKept(StoreError):
    """Refused: the last known-good checkpoint would have been deleted."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def _message(self) -> str:
        return (
            f"step {self.step} is the last known-good checkpoint and stays: mark a newer one good "
            "first, or remove its directory by hand"
        )


class NotFinite(StoreError):
    """Refused: a checkpoint with non-finite arrays is never known-good."""

    def __init__(self, step: int, names: Sequence[str]) -> None:
        super().__init__(step, tuple(names))
        self.step = step
        self.names = tuple(names)

    def _message(self) -> str:
        shown = ", ".join(self.names[:5]) or "its arrays"
        more = f" and {len(self.names) - 5} more" if len(self.names) > 5 else ""
        return (
            f"step {self.step} holds NaN or Inf in {shown}{more} and "
            "cannot be known-good; where that is intended (a mask of -inf), name the array in the "
            "store's `nonfinite_ok`"
        )


class SaveFailed(StoreError):
    """A checkpoint that could not be taken or written; what was there before still is."""

    def __init__(self, step: int, doing: str, error: BaseException, hint: str = "") -> None:
        super().__init__(step, doing, error, hint)
        self.step = step
        self.doing = doing
        self.error = error
        self.hint = hint

    def _message(self) -> str:
        what = f"{type(self.error).__name__}: {self.error}"
        hint = f"; {self.hint}" if self.hint else ""
        return f"step {self.step} was not saved, {self.doing}: {what}{hint}"


class StateMismatch(StoreError):
    """The checkpoint holds another state than the one it is to be restored into."""

    def __init__(self, step: int | None, differences: Sequence[str], where: str = "") -> None:
        super().__init__(step, tuple(differences), where)
        self.step = step
        self.differences = tuple(differences)
        self.where = where

    def _message(self) -> str:
        shown = "; ".join(self.differences[:3])
        more = f"; and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
        which = "the saved state" if self.step is None else f"the checkpoint of step {self.step}"
        place, write = "", "Pass the state that the run was saved from"
        if self.where:
            place, write = f" in {self.where}", f"{write}, or an empty directory to begin a new run"
        return f"{which}{place} does not fit: {shown}{more}. {write}"


class UnsavableState(StoreError, TypeError):
    """A value in the state that a checkpoint cannot hold."""


class Untrusted(StoreError):
    """Something in a checkpoint that is read with `trust=True` only: it could run code."""


def pickled(what: str, how: str) -> Untrusted:
    """The error for a pickle at `what` in the state; `how` names what takes `trust=True`."""
    return Untrusted(
        f"{what} is a pickled object, and reading one runs whatever code its writer put there: it "
        "was not read, and nothing was restored. If nobody but you could write to this directory, "
        f"pass trust=True to {how} once and save again: random states, positions and everything "
        "else with a plain form are written as plain values then, and need no trust any more"
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
