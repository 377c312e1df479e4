"""Base of the stores in one place: on disk or in host memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from healcore.runtime.store.background import Background
from healcore.runtime.store.copies import Copier
from healcore.runtime.store.errors import LastGoodKept, NotFinite, SaveFailed, StoreError
from healcore.runtime.store.protocol import (
    STATUSES,
    CheckpointStore,
    Saved,
    Status,
    is_last_good,
)


class Tier(CheckpointStore):
    """A store in one place, which completes its saves one after another in the background."""

    def __init__(self, name: str, copier: Copier, nonfinite_ok: Collection[str]) -> None:
        self.copier = copier
        """Copies states. Several tiers may share it."""
        self.nonfinite_ok = tuple(nonfinite_ok)
        self._saves = Background(f"healcore-{name}")
        self._nonfinite: list[tuple[int, tuple[str, ...]]] = []

    @abstractmethod
    def _find_saved(self, step: int) -> tuple[Any, Saved]:
        """A checkpoint in the tier's own form, and its entry in `steps`."""

    @abstractmethod
    def _set_status(self, checkpoint: Any, status: Status) -> None:
        """Sets the status of a checkpoint in the tier's own form."""

    @abstractmethod
    def drop(self, step: int) -> None:
        """Removes a checkpoint, even the last known-good one."""

    def mark(self, step: int, status: Status) -> None:
        """Sets the status, atomically."""
        if status not in STATUSES:
            raise StoreError(f"status is one of {', '.join(STATUSES)}, not {status!r}")
        checkpoint, saved = self._find_saved(step)
        if status == "good" and not saved.finite:
            raise NotFinite(step, saved.nonfinite)
        self._set_status(checkpoint, status)

    def delete(self, step: int) -> None:
        """Removes a checkpoint, unless it is the last known-good one."""
        self.join()
        if is_last_good(self.steps(), step):
            raise LastGoodKept(step)
        self.drop(step)

    def join(self) -> None:
        """Waits for the queued saves; raises no failures."""
        self._saves.join()

    def wait(self) -> None:
        """Waits until every save is complete."""
        self._saves.wait()

    def failures(self) -> list[SaveFailed]:
        """Failures since the last call. Does not wait."""
        return self._saves.failures()

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Step and array names of each save since the last call with disallowed NaN or Inf."""
        saves, self._nonfinite = self._nonfinite, []
        return saves

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing."""
        return self.copier.nonfinite_in(state)
