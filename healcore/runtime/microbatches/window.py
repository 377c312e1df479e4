"""The parts of the batches since the last optimizer step, which are done again if one fails.

`for part in window.parts(batch):` with `with part:` around the forward and the backward pass. The
context manager catches what the body raises, which a generator does not see; the generator then
begins again with smaller parts, those of earlier batches of the same accumulation too.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.microbatches.sizes import MicrobatchSizes, Resize
from healcore.runtime.microbatches.splitting import BatchSize, UnsplittableBatch, measure, split

Batch = TypeVar("Batch")
Count = Callable[[Any], Any] | str | None


class MicrobatchError(HealcoreError, RuntimeError):
    """The loop over the parts of a batch is not written as it has to be."""


class Microbatch(Generic[Batch]):
    """A part of a batch: a context manager for its forward and backward pass.

    Attributes:
        batch: its samples, in the structure of the whole batch.
        weight: its share of the batch's samples, or tokens: the factor on a mean loss.
        first: whether it begins a sum of gradients; again True where the window is done again.
        last: whether no further part of the batches so far follows.
        failed: whether it ran out of memory; the window is done again.
    """

    def __init__(
        self,
        batch: Batch,
        weight: float,
        *,
        first: bool,
        last: bool,
        on_error: Callable[[BaseException], bool],
    ) -> None:
        self.batch = batch
        self.weight = weight
        self.first = first
        self.last = last
        self.failed = self.entered = False
        self._on_error = on_error

    def __enter__(self) -> Microbatch[Batch]:
        self.entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        self.failed = self._on_error(error)
        return self.failed


class Gradients(Protocol):
    """What a framework does about the gradients of a window; part of its driver."""

    def accumulating(self) -> bool:
        """Whether there are gradients that no optimizer step has used."""
        ...

    def begin_window(self) -> None:
        """Called before the first part since the last step."""
        ...

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`."""
        ...

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Makes everything as at `begin_window`, and frees what the failed part holds.

        Args:
            held: values of variables that the loop still has.
            clear_cache: also return unused memory of the framework's allocator.
        """
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
    size: Callable[[], BatchSize]
    """Measures its batch."""
    parts: int
    """Into how many parts its batch was split."""
    redoable: bool
    """Whether all gradients are of this window's parts."""


class AccumulationWindow:
    """The batches since the last optimizer step.

    Args:
        gradients: of the framework.
        sizes: of the parts.
        on_failure: called with a part that raised; whether to do the window again, with what
            `sizes` has then. What it raises ends the loop.
        may_grow: called before a window; the step that it is at, or None: nothing is risked now.
        on_growth: called with a larger size that is tried.
        clear_cache: see `Gradients.redo_window`.
    """

    def __init__(
        self,
        gradients: Gradients,
        sizes: MicrobatchSizes,
        *,
        on_failure: Callable[[Failure], bool],
        may_grow: Callable[[], int | None],
        on_growth: Callable[[Resize], None],
        clear_cache: bool = True,
    ) -> None:
        self._gradients = gradients
        self.sizes = sizes
        self._on_failure = on_failure
        self._may_grow = may_grow
        self._on_growth = on_growth
        self._clear_cache = clear_cache
        self._entries: list[_Entry] = []
        self._only_ours = True
        self._held: list[Any] = []
        self.part: Microbatch[Any] | None = None
        """The part that the loop is at."""

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
        done = len(self._entries) - 1  # earlier batches of this window are done
        first = not done
        try:
            while True:
                for part in self._parts(self._entries[done:], first=first):
                    self.part = part
                    yield part
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
                done, first = 0, True
        finally:
            self.part = None

    # -- within ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins a new window, unless the last one is still waiting for its optimizer step."""
        accumulating = self._gradients.accumulating()
        if accumulating and self._entries and not self._gradients.has_stepped():
            return
        self._entries.clear()
        # Gradients from elsewhere (another loss, another optimizer) could not be made again.
        self._only_ours = not accumulating
        self._gradients.begin_window()

    def _parts(self, entries: list[_Entry], *, first: bool) -> Iterator[Microbatch[Any]]:
        for entry in entries:
            number = self._number_of_parts(entry)
            pieces = split(entry.batch, number)
            weights = _weights(pieces, entry)
            # A mean over nothing is NaN, and so is 0 times it.
            pairs = [pair for pair in zip(pieces, weights, strict=True) if pair[1]]
            for i, (piece, weight) in enumerate(pairs):
                yield Microbatch(
                    piece,
                    weight,
                    first=first,
                    last=entry is entries[-1] and i == len(pairs) - 1,
                    on_error=lambda error, e=entry, n=number: self._failed(error, e, n),
                )
                first = False

    def _number_of_parts(self, entry: _Entry) -> int:
        if not self.sizes.limited and entry.most is None:
            return 1
        try:
            size = measure(entry.batch)
        except UnsplittableBatch:
            if entry.most is not None:
                raise
            return 1  # it may fit as a whole
        if len(self._entries) == 1 and entry.most is None:
            step = self._may_grow()
            grown = None if step is None else self.sizes.grow(size, step)
            if grown is not None:
                self._on_growth(grown)
        return self.sizes.parts(size, entry.most)

    def _failed(self, error: BaseException, entry: _Entry, parts: int) -> bool:
        failure = Failure(error, lambda: measure(entry.batch), parts, self._only_ours)
        if not self._on_failure(failure):
            return False
        self._held = released(error)
        return True


def released(error: BaseException) -> list[Any]:
    """Clears the variables of the functions that an exception has ended.

    Returns:
        The values of the variables of functions that still run, which cannot be cleared.
    """
    held: list[Any] = []
    pending, seen = [error], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        pending += [e for e in (each.__cause__, each.__context__) if e is not None]
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            variables = frame.f_locals
            held += variables.values()
            if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables.clear()  # before Python 3.13 a copy, which the frame would keep
    return held


def _weights(pieces: list[Any], entry: _Entry) -> list[float]:
    """The share of each part: of its batch, or of `total`."""
    if len(pieces) == 1 and entry.total is None:
        return [1.0]
    samples = [float(measure(piece).samples) for piece in pieces]
    counts = [_count(piece, entry) for piece in pieces] if entry.count else samples
    whole = sum(counts) if entry.total is None else float(entry.total)
    if not whole:
        counts, whole = samples, sum(samples)
    return [each / whole for each in counts]


def _count(piece: Any, entry: _Entry) -> float:
    if callable(entry.count):
        return float(entry.count(piece))
    return float((piece[entry.count] != entry.ignore_index).sum())
