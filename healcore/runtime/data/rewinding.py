"""The ways in which loaders can be put back: one class per way, `source_of` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from healcore.runtime.data import forward


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


class LoaderState:
    """`state_dict` and `load_state_dict` on the loader: torchdata's StatefulDataLoader and Loader.

    A loaded state holds for the next `iter`; one from the end of a pass leads into the next pass.

    The samplers' generators are kept beside it. A generator given to a StatefulDataLoader shuffles
    and also draws the workers' seeds; its state records where the shuffling began, not what has
    been drawn since, and after a `load_state_dict` alone the next epoch has another order.
    """

    kind = "loader"
    why_not = None
    whole = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = (
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        found = [getattr(sampler, "generator", None) for sampler in samplers]
        self._generators: list[Any] = [each for each in found if _has(each, _GET_STATE)]

    def start(self) -> Iterator[Any]:
        """A new pass."""
        return iter(self._loader)

    def state(self) -> Any:
        """Of the pass begun last."""
        return self._state(ended=False)

    def state_between(self) -> Any:
        """Of the pass that is through."""
        return self._state(ended=True)

    def resume(self, state: Any) -> Iterator[Any]:
        """Loads, and begins the pass that loads."""
        self._loader.load_state_dict(state["loader"])
        batches = self._begin_loaded()
        for generator, its_state in zip(self._generators, state["generators"], strict=True):
            generator.set_state(its_state)
        # The next pass has been begun by now, with an order drawn too early.
        return self.start() if self._generators and state["ended"] else batches

    def _state(self, *, ended: bool) -> dict[str, Any]:
        return {
            "loader": self._loader.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "ended": ended,
        }

    def _begin_loaded(self) -> Iterator[Any]:
        # torchdata's nodes.Loader looks ahead: behind the last batch it would begin the next pass,
        # and its batches would get the names of this one.
        if getattr(self._loader, "restart_on_stop_iteration", None) is not True:
            return iter(self._loader)
        self._loader.restart_on_stop_iteration = False
        try:
            return iter(self._loader)
        finally:
            self._loader.restart_on_stop_iteration = True


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


_STATE_DICT = ("state_dict", "load_state_dict")
_GET_STATE = ("get_state", "set_state")


def source_of(loader: Any) -> Source:
    """The loader as a source. Begins a pass where only its iterator shows what it can do."""
    if _has(loader, _STATE_DICT):
        why_not = forward.unrecorded(loader)
        return Forward(loader, None, why_not) if why_not else LoaderState(loader)
    # Strings are sequences too, but of no batches anybody wants; they go the common way.
    if isinstance(loader, Sequence):
        return Items(loader)
    first = iter(loader)
    for names in (_GET_STATE, _STATE_DICT):
        if _has(first, names):
            return IteratorState(loader, first, names)
    return Forward(loader, first, forward.why_not(loader))


def _has(thing: Any, names: tuple[str, str]) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)
