"""`Batches`: the iterator that `Healer.batches` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from healcore.runtime.healer import Healer

Batch = TypeVar("Batch")
"""The type of a batch of the loader."""


class Batches(Iterator[Batch]):
    """The batches of a loop over `Healer.batches`, with the attributes of the loader.

    A function that gets a loader as its argument can get this object instead: `batches.dataset` is
    the loader's `dataset`, and setting an attribute sets it on the loader.

    Attributes:
        healer: the Healer, for a function that gets only the loader.
    """

    def __init__(
        self, healer: Healer[Any], batches: Iterator[Batch], loader: Any, epochs: int | None
    ) -> None:
        """Wraps an iterator.

        Args:
            healer: the Healer whose loop it is.
            batches: the batches, with the work between two steps after each of them.
            loader: the loader that they come from.
            epochs: passes over the loader, or None for no end.
        """
        # Not by assignment, which would set attributes of the loader.
        vars(self).update(healer=healer, _batches=batches, _loader=loader, _epochs=epochs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_loader"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        """Returns the number of batches in all epochs, also after a restart.

        Raises:
            TypeError: the loader has no length, or the loop has no end.
        """
        if self._epochs is None:
            raise TypeError("batches(..., epochs=None) has no len")
        return self._epochs * len(self._loader)

    def with_state(self) -> Batches[tuple[Batch, Any]]:
        """Returns an iterator over pairs of a batch and the state to start its step from, for JAX.

            for batch, state in healer.batches(loader).with_state():
                state = healer.update(train_step(state, batch))

        Without the pairs a loop has to read `healer.state` for each step: a rollback replaces the
        state.
        """
        return Batches(self.healer, self._pairs(), self._loader, self._epochs)

    def _pairs(self) -> Iterator[tuple[Batch, Any]]:
        """Yields each batch with the live state."""
        for batch in self:
            yield batch, self.healer.state
