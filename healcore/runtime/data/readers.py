"""Readers: how a loader of each kind begins an epoch, and returns to a place in it.

`Reader` is the protocol; `reader_choice` has the kinds of loaders, and a reader for functions;
`torch_reader` has the reader of torch's DataLoader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from healcore.runtime.data.loaders import generators_of, samplers_of

ReaderState = Any
"""The state of a reader. A checkpoint holds it as text of `runtime.store.values`, so it consists of
numbers, texts, bytes, containers, and arrays of NumPy, torch or JAX."""


@dataclass(frozen=True)
class RewindObstacle:
    """Why a loader, or the loop over the epochs, cannot be rewound."""

    reason: str
    """The reason, as a clause."""
    detail: str = ""
    """What to write instead, or the error of the loader; or an empty string."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Reader:
    """Begins the epochs of a loader. This base class is for loaders that cannot be rewound.

    Args:
        loader: the user's loader.
        obstacle: why the loader cannot be rewound, or None if it can.
        first: the batches of the first epoch, if it has begun already because the iterator had to
            be examined. Otherwise None.

    Attributes:
        kind: name in positions, because a state fits only loaders of the same kind.
        replays: whether the reader knows the state at each index of its epoch, and at its begin
            before it begins. Otherwise it knows only the state of now: of an epoch that has begun,
            or between two epochs.
        generators: the random generators of the loader and its parts.
        draws_in_order: whether the generators, after a batch, are where the next batch finds them.
    """

    kind = "forward"
    replays = False
    draws_in_order = True

    def __init__(
        self,
        loader: Any,
        *,
        obstacle: RewindObstacle | None = None,
        first: Iterator[Any] | None = None,
    ) -> None:
        self.loader = loader
        self.obstacle = obstacle
        self.generators: list[Any] = []
        self._first = first

    def begin(self) -> Iterator[Any]:
        """Begins an epoch, and returns its batches."""
        first, self._first = self._first, None
        return iter(self.loader) if first is None else first

    def state(self, index: int, *, newest: bool) -> ReaderState | None:
        """The state before a batch of this epoch, or None if it is unknown.

        Args:
            index: number of the batch in the epoch, from 0.
            newest: whether it is the next batch.
        """
        return None

    def state_between(self) -> ReaderState | None:
        """The state from which the next epoch begins, or None if it needs none."""
        return None

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Returns to a place in an epoch.

        Args:
            state: result of `state` or `state_between` in this or in an earlier process.
            index: number of the next batch in the epoch.

        Returns:
            The rest of the epoch, or None if the epoch begins when its first batch is read; and the
            index at which it is. The caller reads and drops the batches from there to `index`.

        Raises:
            DataError: the epoch has another order now. The reader stays where it is.
        """
        return self.begin(), 0

    def rows(self, index: int) -> list[int] | None:
        """The dataset's indices of the batch before `index`, for events, or None if unknown."""
        return None

    def can_read_again(self, index: int) -> bool:
        """Whether a rank alone can read a batch again: nothing is exchanged with other ranks.

        Args:
            index: number of the batch in the epoch, from 0.
        """
        return True


class StatefulReader(Reader):
    """A loader with `state_dict` and `load_state_dict`: such as torchdata's StatefulDataLoader.

    A StatefulDataLoader draws the order and the workers' seeds from one random generator, and its
    state records only where the shuffling began. So the generators of the samplers are part of a
    position.
    """

    kind = "loader"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.generators = generators_of(*samplers_of(loader))

    def state(self, index: int, *, newest: bool) -> ReaderState | None:
        """The state of the loader, at the next batch only."""
        return {"index": index, "loader": self.loader.state_dict()} if newest else None

    def state_between(self) -> ReaderState:
        """The state of the loader, which may belong to the epoch that has ended."""
        return {"index": None, "loader": self.loader.state_dict()}

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Loads the state. After an end, the next `iter` begins the next epoch."""
        self.loader.load_state_dict(state["loader"])
        if state["index"] is not None:
            return iter(self.loader), state["index"]
        if self.generators:
            iter(self.loader)  # ends the epoch, and draws before the generators are set
        return None, 0


class IteratorReader(Reader):
    """A loader whose iterator has a state, such as Grain's `get_state` and `set_state`.

    The state is set on the existing iterator: a new iterator could shuffle in another way.
    """

    kind = "iterator"

    def __init__(self, loader: Any, first: Iterator[Any], names: tuple[str, str]) -> None:
        super().__init__(loader, first=first)
        self._iterator = first
        self._get, self._set = names

    def begin(self) -> Iterator[Any]:
        """Begins an epoch with a new iterator."""
        self._iterator = super().begin()
        return self._iterator

    def state(self, index: int, *, newest: bool) -> ReaderState | None:
        """The state of the iterator, at the next batch only."""
        return {"index": index, "own": getattr(self._iterator, self._get)()} if newest else None

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any], int]:
        """Sets the state on the iterator of now."""
        self._first = None
        getattr(self._iterator, self._set)(state["own"])
        return self._iterator, state["index"]


class IndexReader(Reader, Iterator[Any]):
    """A sequence, or an object with `__getitem__` only, which is read by index."""

    kind = "sequence"
    replays = True
    _next = 0

    def begin(self) -> Iterator[Any]:
        """Begins with index 0."""
        self._next = 0
        return self

    def state(self, index: int, *, newest: bool) -> int:
        """The index."""
        return index

    def resume(self, state: int, index: int) -> tuple[Iterator[Any], int]:
        """Moves to the index. No batch before it is read."""
        self._next = index
        return self, index

    def __next__(self) -> Any:
        at, has_length = self._next, hasattr(self.loader, "__len__")
        if has_length and at >= len(self.loader):
            raise StopIteration
        try:
            batch = self.loader[at]
        except Exception as error:  # an unreadable item counts as read, an interrupted one does not
            if isinstance(error, IndexError) and not has_length:
                raise StopIteration from None
            self._next = at + 1
            raise
        self._next = at + 1
        return batch
