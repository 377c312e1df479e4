"""Rewinds streams that have no position, by a function that makes them again.

A generator, a `zip` or a stream of webdataset cannot go back. A function that makes a new one can:
`healer.batches(lambda: zip(a, b))`. After a rollback or a restart the function is called again, and
the new stream is moved to the position: by its own state where it has one, otherwise by reading and
dropping the batches before the position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from healcore.runtime.data.adapter_choice import adapter_for
from healcore.runtime.data.loader_adapter import BatchIterator, LoaderAdapter
from healcore.runtime.data.loader_parts import AnyBatch, AnyLoader, LoaderState
from healcore.runtime.data.positions import DataError, UnusableLoader
from healcore.runtime.data.random_states import RandomStates, random_states, set_random_states


def reader_for(loader: AnyLoader) -> LoaderAdapter:
    """Chooses what reads a loader, by the kind of the loader; see `adapter_choice`."""
    if is_function(loader):
        return FunctionLoader(loader)
    return adapter_for(loader)


def is_function(loader: AnyLoader) -> bool:
    """Whether a loader is a function that makes what is iterated over.

    A class is not such a function, and neither is an object that can be iterated over itself.

    Raises:
        UnusableLoader: the function needs arguments.
    """
    if isinstance(loader, type) or not callable(loader):
        return False
    if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
        return False
    try:
        inspect.signature(loader).bind()
    except TypeError as error:
        raise UnusableLoader(
            f"a function that makes the batches takes no arguments, and {function_name(loader)} "
            f"needs some ({error}): pass lambda: {function_name(loader)}(...)"
        ) from None
    except ValueError:
        pass  # a function of C has no signature
    return True


def function_name(function: object) -> str:
    """The name of a function for messages; the name of the class for other callable objects."""
    return getattr(function, "__qualname__", type(function).__qualname__)


class FunctionLoader(LoaderAdapter, Iterator[AnyBatch]):
    """Reads what a function makes, and calls the function for each epoch and each rewind.

    The function is called with the random states of the first time, so that an order which it draws
    from the global random generators is the same again. A stream that draws at each batch needs a
    random generator of its own: the steps draw from the global ones between its batches.

    Args:
        make: function without arguments that returns something new to iterate over at each call.
    """

    kind = "function"
    begins_again = True

    def __init__(self, make: Callable[[], AnyLoader]) -> None:
        super().__init__(make)
        self._made: AnyLoader = None
        self._inner = LoaderAdapter(None)
        """The adapter of what the function has made for this epoch."""
        self._batches: BatchIterator | None = None
        """The rest of the epoch, or None before it has begun."""
        self._read = 0
        """Number of batches read from this epoch."""
        self._random: RandomStates = {}
        """The random states before the function was called for this epoch."""

    def start(self, epoch: int) -> BatchIterator:
        """Calls the function, and begins an epoch of what it returns.

        Keeps the random states of before the call, so that a rewind can call the function with the
        same states.
        """
        self._random = random_states()
        self._make()
        self._batches = self._inner.start(epoch)
        self._read = 0
        return self

    def state(self, *, ended: bool) -> LoaderState | None:
        """The position in the stream, or None before the stream was made.

        It holds the number of batches read, the random states of before the call of the function,
        and the stream's own state if it has one.
        """
        if ended or self._batches is None:
            return None
        own = None
        if self._inner.obstacle is None:
            own = self._inner.state(ended=False)
        return self._state(self._read, own)

    def state_before(self, index: int) -> LoaderState | None:
        """The state before a batch of this epoch that was read.

        It is always known if the stream has no state of its own: then the number of batches to drop
        is enough. Otherwise it is known if the stream knows its own state before the batch.
        """
        own = None
        if self._inner.obstacle is None:
            own = self._inner.state_before(index)
            if own is None:
                return None
        return self._state(index, own)

    def _state(self, read: int, own: LoaderState | None) -> LoaderState:
        """The state after `read` batches; `own` is the stream's state there, or None."""
        return {"read": read, "random": self._random, "kind": self._inner.kind, "own": own}

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        """Calls the function again, with the random states of the saved call.

        Args:
            state: what `state` has returned.
            skip: number of batches after the state that are not read again.

        Returns:
            The new stream, and the number of batches to read and drop.

        Raises:
            DataError: the function returns the stream that it has returned before.
        """
        before = self._made
        set_random_states(state["random"])
        self._make()
        if self._made is before and isinstance(before, Iterator):
            if state["read"] + skip == self._read:
                return self, 0
            raise DataError(
                "the function has returned the iterator that it had returned before, which cannot "
                "go back: it has to make a new one at each call"
            )
        self._random = dict(state["random"])
        if state["own"] is not None and state["kind"] == self._inner.kind:
            self._batches, left = self._inner.resume(state["own"], skip)
        else:
            self._batches, left = self._inner.start(0), state["read"] + skip
        self._read = state["read"] + skip - left
        return self, left

    def can_read_again(self, index: int) -> bool:
        """Whether a rank alone can begin what the function makes."""
        return self._inner.can_read_again(0)

    def rows(self) -> list[int] | None:
        """The dataset's indices of the batch that was read last, or None if they are unknown."""
        return self._inner.rows()

    def __next__(self) -> AnyBatch:
        assert self._batches is not None
        try:
            batch = next(self._batches)
        except StopIteration:  # the end of the epoch is no batch
            raise
        except Exception:  # an unreadable batch counts as read
            self._read += 1
            raise
        self._read += 1
        return batch

    def _make(self) -> None:
        """Calls the function, and chooses the adapter of what it returns."""
        made = self._loader()
        self._made = made
        self._inner = adapter_for(made)
        self.draws = self._inner.draws
