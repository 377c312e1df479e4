"""Repeats the batches since the last optimizer step in smaller parts when memory runs out.

The loop is `for part in window.parts(batch):`, with `with part:` around the forward and backward
pass. The context manager catches the exception of its body, which the generator `parts` does not
see. The generator then begins again with the first batch of the accumulation window.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.microbatches.sizes import MicrobatchSizes
from healcore.runtime.microbatches.splitting import UnsplittableBatch, count_samples, split
from healcore.runtime.store.ranks import Ranks

Batch = TypeVar("Batch")
Count = Callable[[Any], Any] | str | None


class MicrobatchError(HealcoreError, RuntimeError):
    """The loop over the parts of a batch does not have the required form."""


class Microbatch(Generic[Batch]):
    """A part of a batch: a context manager for its forward and backward pass.

    Attributes:
        batch: the samples of the part, in the structure of the whole batch.
        weight: share of the batch's samples or tokens in the part: the factor for a mean loss.
        first: whether the part begins a sum of gradients, also when the window is repeated.
        last: whether it is the last part of the batches so far.
        failed: whether memory ran out, here or on another rank, and the window is repeated.
    """

    def __init__(
        self,
        batch: Batch,
        weight: float,
        *,
        first: bool,
        last: bool,
        on_exit: Callable[[BaseException | None], bool],
    ) -> None:
        self.batch = batch
        self.weight = weight
        self.first = first
        self.last = last
        self.failed = self.entered = False
        self._on_exit = on_exit

    def __enter__(self) -> Microbatch[Batch]:
        self.entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.failed = self._on_exit(error)
        return self.failed


class Gradients(Protocol):
    """The gradients of a window. Each framework's driver implements it."""

    def accumulating(self) -> bool:
        """Whether any gradients have not been used by an optimizer step."""
        ...

    def begin_window(self) -> None:
        """Called before the first part since the last step."""
        ...

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`."""
        ...

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Restores the state of `begin_window` and frees the memory of the failed part.

        Args:
            held: values that variables of the loop still refer to.
            clear_cache: whether to return unused memory of the framework's allocator.
        """
        ...

    def between_ranks(self, ranks: Ranks) -> Synchronization | str:
        """The synchronization of several ranks, or a sentence why they cannot repeat a window."""
        ...


class Synchronization(Protocol):
    """Synchronizes several ranks although a part may fail on any of them.

    No rank may wait for another rank within a part, so the framework's exchanges happen before the
    first part or after the last part of a batch.
    """

    def begin_batch(self, *, first: bool) -> None:
        """Does the exchanges of a forward pass. Called before the first part of a batch.

        `first`: whether it is the first batch since the last step, or of a repeated window.
        """
        ...

    def any_failed(self, failed: bool) -> bool:
        """Whether any rank has failed. Every rank calls it once per batch."""
        ...

    def reduce(self) -> None:
        """Reduces the batch's gradients over the ranks. Called unless a rank has failed."""
        ...


class _Entry(NamedTuple):
    """A batch of the window."""

    batch: Any
    count: Count
    ignore_index: int
    total: float | None
    most: int | None


class Failure(NamedTuple):
    """A part that raised."""

    error: BaseException
    batch: Any
    """The batch of the part."""
    parts: int
    """Number of parts of its batch."""
    redoable: bool
    """Whether all gradients come from the parts of this window."""


class AccumulationWindow:
    """The batches since the last optimizer step.

    Args:
        gradients: gradients of the framework's driver.
        sizes: limits on the sizes of parts.
        decide: called with a part that raised, and if ranks are synchronized also with None after
            the last part of a batch. Returns whether to repeat the window with the new `sizes`. Its
            exceptions end the loop.
        on_redo: called before the batches since the last step are repeated.
        clear_cache: see `Gradients.redo_window`.
        synchronize: called before the first window. Returns None if this rank decides alone.

    Attributes:
        part: the current part, or None.
        synchronization: the result of `synchronize`.
    """

    def __init__(
        self,
        gradients: Gradients,
        sizes: MicrobatchSizes,
        *,
        decide: Callable[[Failure | None], bool],
        on_redo: Callable[[], object] = lambda: None,
        clear_cache: bool = True,
        synchronize: Callable[[], Synchronization | None] = lambda: None,
    ) -> None:
        self._gradients = gradients
        self.sizes = sizes
        self._decide = decide
        self._on_redo = on_redo
        self._clear_cache = clear_cache
        self._synchronize = synchronize
        self.synchronization: Synchronization | None = None
        self._begun = False
        self._entries: list[_Entry] = []
        self._redoable = True
        self._held: list[Any] = []
        self.part: Microbatch[Any] | None = None

    def parts(
        self,
        batch: Batch,
        *,
        count: Count = None,
        ignore_index: int = -100,
        total: float | None = None,
        most: int | None = None,
    ) -> Iterator[Microbatch[Batch]]:
        """Yields the parts of a batch; see `Healer.microbatches`."""
        self._begin()
        self._entries.append(_Entry(batch, count, ignore_index, total, most))
        done = len(self._entries) - 1  # number of earlier batches of this window
        first = not done
        try:
            while True:
                for part in self._parts(self._entries[done:], first=first):
                    self.part = part
                    if part.weight or self.synchronization is None:
                        yield part
                    else:  # no token of this rank's batch counts, but tokens of other ranks do
                        with part:
                            pass
                    if not part.entered:
                        raise MicrobatchError(
                            "each part of healer.microbatches is a context manager: write "
                            "`with part:` around its forward and backward pass"
                        )
                    if part.failed:
                        break
                else:
                    return
                self.part = None
                self._gradients.redo_window(self._held, clear_cache=self._clear_cache)
                self._held.clear()
                self._on_redo()
                done, first = 0, True
        finally:
            self.part = None

    # -- within ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins a new window, unless the current window still waits for its optimizer step."""
        accumulating = self._gradients.accumulating()
        if accumulating and self._entries and not self._gradients.has_stepped():
            return
        self._entries.clear()
        # Gradients from elsewhere cannot be computed again.
        self._redoable = not accumulating
        self._gradients.begin_window()
        if not self._begun:
            self._begun, self.synchronization = True, self._synchronize()

    def _parts(self, entries: list[_Entry], *, first: bool) -> Iterator[Microbatch[Any]]:
        for entry in entries:
            number = self._number_of_parts(entry)
            pieces = split(entry.batch, number)
            weights = _weights(pieces, entry)
            # Drops parts without tokens: their mean loss is NaN, and so is 0 times NaN.
            pairs = [pair for pair in zip(pieces, weights, strict=True) if pair[1]]
            if self.synchronization is not None:
                self.synchronization.begin_batch(first=first)
                pairs = pairs or [(pieces[0], 0.0)]
            for i, (piece, weight) in enumerate(pairs):
                ends = i == len(pairs) - 1
                yield Microbatch(
                    piece,
                    weight,
                    first=first,
                    last=entry is entries[-1] and ends,
                    on_exit=partial(self._left, entry, number, ends),
                )
                first = False

    def _number_of_parts(self, entry: _Entry) -> int:
        if self.sizes.limit is None and entry.most is None:
            return 1
        try:
            samples = count_samples(entry.batch)
        except UnsplittableBatch:
            if entry.most is not None:
                raise
            return 1  # the whole batch may fit
        return self.sizes.parts(samples, entry.most)

    def _left(self, entry: _Entry, parts: int, last: bool, error: BaseException | None) -> bool:
        """Ends one of the `parts` of a batch. Returns whether to repeat the window."""
        failure = None
        if error is not None:
            failure = Failure(error, entry.batch, parts, self._redoable)
        elif self.synchronization is None or not last:
            return False
        repeat = self._decide(failure)
        if repeat and error is not None:
            self._held = released(error)
        return repeat


def released(error: BaseException) -> list[Any]:
    """Clears the variables of functions that an exception has ended.

    Returns:
        The values of variables of functions that still run, which cannot be cleared.
    """
    held: list[Any] = []
    pending, seen = [error], set[int]()
    while pending:
        exception = pending.pop()
        if id(exception) in seen:
            continue
        seen.add(id(exception))
        pending += [e for e in (exception.__cause__, exception.__context__) if e is not None]
        traceback.clear_frames(exception.__traceback__)
        for frame, _ in traceback.walk_tb(exception.__traceback__):
            variables = frame.f_locals
            held += variables.values()
            if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables.clear()  # a copy before Python 3.13, which the frame keeps
    return held


def _weights(pieces: list[Any], entry: _Entry) -> list[float]:
    """The share of each part in its batch, or in `total`."""
    if len(pieces) == 1 and entry.total is None:
        return [1.0]
    samples = [float(count_samples(piece)) for piece in pieces]
    counts = [_count(piece, entry) for piece in pieces] if entry.count else samples
    whole = sum(counts) if entry.total is None else float(entry.total)
    if not whole:
        counts, whole = samples, sum(samples)
    return [count / whole for count in counts]


def _count(piece: Any, entry: _Entry) -> float:
    if callable(entry.count):
        return float(entry.count(piece))
    return float((piece[entry.count] != entry.ignore_index).sum())
