"""The ways in which loaders can be put back: one class per way, `source_of` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from healcore.runtime.data import forward
from healcore.runtime.data.loader_state import GET_STATE, STATE_DICT, LoaderState, has_both


class Source(Protocol):
    """A loader, and how its place is read and set."""

    @property
    def kind(self) -> str:
        """Stands in positions: a state is given back only to the kind it came from."""
        ...

    @property
    def why_not(self) -> str | None:
        """Why it cannot be put back, in words; None if it can."""
        ...

    @property
    def whole(self) -> bool:
        """Later passes depend on nothing that is not in the state either."""
        ...

    def start(self) -> Iterator[Any]:
        """A new pass."""
        ...

    def state(self) -> Any:
        """Of the pass begun last, right after the batch it gave last."""
        ...

    def state_between(self) -> Any:
        """When that pass is through: leads into the next one. None: a new pass is all it takes."""
        ...

    def resume(self, state: Any) -> Iterator[Any]:
        """The rest of the pass that the state is of, or the next pass."""
        ...


class IteratorState:
    """A getter and a setter on the iterator: `get_state` and `set_state` are Grain's names."""

    kind = "iterator"
    why_not = None
    whole = False

    def __init__(self, loader: Any, first: Iterator[Any], names: tuple[str, str]) -> None:
        self._loader = loader
        self._first: Iterator[Any] | None = first
        self._current = first
        self._get, self._set = names

    def start(self) -> Iterator[Any]:
        """A new pass; the first is the one that was looked at."""
        self._current = iter(self._loader) if self._first is None else self._first
        self._first = None
        return self._current

    def state(self) -> Any:
        """Of the iterator."""
        return getattr(self._current, self._get)()

    def state_between(self) -> None:
        """None: a pass is an iterator of its own."""

    def resume(self, state: Any) -> Iterator[Any]:
        """Sets the iterator there is: a new one could move what the loader shuffles by."""
        current = self._current if self._first is None else self.start()
        getattr(current, self._set)(state)
        return current


class Items:
    """A sequence, by index: lists, tuples, ranges."""

    kind = "sequence"
    why_not = None
    whole = True

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items
        self._next = 0

    def start(self) -> Iterator[Any]:
        """From the first item."""
        return self.resume(0)

    def state(self) -> int:
        """The next index."""
        return self._next

    def state_between(self) -> None:
        """None: every pass is the same."""

    def resume(self, state: int) -> Iterator[Any]:
        """From that index."""
        self._next = state
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._items):
            raise StopIteration
        self._next += 1
        return self._items[self._next - 1]


class Forward:
    """Everything else. It has no state, and says why."""

    kind = "forward"
    whole = True

    def __init__(self, loader: Any, first: Iterator[Any] | None, why_not: str) -> None:
        self._loader = loader
        self._first = first
        self.why_not: str | None = why_not

    def start(self) -> Iterator[Any]:
        """A new pass; the first is the one that was looked at."""
        first, self._first = self._first, None
        return iter(self._loader) if first is None else first

    def state(self) -> None:
        """None."""

    def state_between(self) -> None:
        """None."""

    def resume(self, state: Any) -> Iterator[Any]:
        """Cannot be."""
        raise NotImplementedError(self.why_not)


def source_of(loader: Any) -> Source:
    """The loader as a source. Begins a pass where only its iterator shows what it can do."""
    if has_both(loader, STATE_DICT):
        why_not = forward.unrecorded(loader)
        return Forward(loader, None, why_not) if why_not else LoaderState(loader)
    if isinstance(loader, Sequence):
        return Items(loader)
    first = iter(loader)
    for names in (GET_STATE, STATE_DICT):
        if has_both(first, names):
            return IteratorState(loader, first, names)
    return Forward(loader, first, forward.why_not(loader))
