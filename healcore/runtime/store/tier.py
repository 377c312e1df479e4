"""Base of the stores in one place: on disk or in host memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from healcore.runtime.store.background import Background
from healcore.runtime.store.copies import Copier
from healcore.runtime.store.errors import SaveFailed
from healcore.runtime.store.protocol import CheckpointStore


class Tier(CheckpointStore):
    """A store in one place, which completes its saves one after another in the background."""

    def __init__(self, name: str, copier: Copier, nonfinite_ok: Collection[str]) -> None:
        self.copier = copier
        """Copies states. Several tiers may share it."""
        self.nonfinite_ok = tuple(nonfinite_ok)
        self.queue = self._saves = Background(f"healcore-{name}")
        self._nonfinite: list[tuple[int, tuple[str, ...]]] = []

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
