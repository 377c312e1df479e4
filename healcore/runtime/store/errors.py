"""Errors of checkpoint stores. None of them changes the live state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from healcore.core.errors import HealcoreError


class StoreError(HealcoreError, RuntimeError):
    """Base class of all errors of checkpoint stores."""


class NoGoodCheckpoint(StoreError):
    """There is no checkpoint to roll back to."""


class UnsavableState(StoreError, TypeError):
    """The state holds a value that a checkpoint cannot hold."""


@dataclass(eq=False, repr=False)
class CheckpointDamaged(StoreError):
    """The bytes of a checkpoint differ from the saved bytes. Use an older checkpoint."""

    step: int
    path: str
    """Directory of the checkpoint, or "memory"."""
    file: str
    """The file (or array) that differs, relative to `path`."""
    difference: str

    def _message(self) -> str:
        return (
            f"the checkpoint of step {self.step} is damaged: {self.file} {self.difference} "
            f"(in {self.path}); nothing was restored: use an older checkpoint"
        )


@dataclass(eq=False, repr=False)
class CheckpointNotFound(StoreError):
    """The store has no complete checkpoint of the requested step."""

    step: int
    existing: Sequence[int]
    location: str

    def _message(self) -> str:
        newest = ", ".join(str(step) for step in self.existing[-5:]) or "none"
        more = "..., " if len(self.existing) > 5 else ""
        return f"{self.location} has no checkpoint of step {self.step}; it has: {more}{newest}"


@dataclass(eq=False, repr=False)
class SaveFailed(StoreError):
    """A checkpoint could not be copied or written. Earlier checkpoints are unchanged."""

    step: int
    doing: str
    error: BaseException

    def _message(self) -> str:
        # torch hides the error of the system behind an error of its own.
        system: BaseException | None = self.error
        while system is not None and not isinstance(system, OSError):
            system = system.__cause__ or system.__context__
        reason = f" ({system})" if system not in (None, self.error) else ""
        error = f"{type(self.error).__name__}: {self.error}"
        return f"step {self.step} was not saved, {self.doing}: {error}{reason}"


@dataclass(eq=False, repr=False)
class StateMismatch(StoreError):
    """The saved state does not fit the live state."""

    step: int | None
    differences: Sequence[str]
    where: str = ""

    def _message(self) -> str:
        shown = "; ".join(self.differences[:3])
        more = f"; and {len(self.differences) - 3} more" if len(self.differences) > 3 else ""
        which = "the saved state" if self.step is None else f"the checkpoint of step {self.step}"
        place = f" in {self.where}" if self.where else ""
        otherwise = ", or an empty directory to begin a new run" if self.where else ""
        return (
            f"{which}{place} does not fit: {shown}{more}. Pass the state as it was saved, with all "
            f"parameters that the run had added by then{otherwise}"
        )
