"""The parts of a batch, and what a framework does to repeat the batches since the last step."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.microbatches.splitting import count_samples
from healcore.runtime.store.ranks import Ranks

Batch = TypeVar("Batch")
Count = Callable[[Any], Any] | str | None

IGNORE_INDEX = -100
"""Label that does not count, as in torch's `cross_entropy`."""


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
    """The gradients of a window, which is all parts since the last optimizer step."""

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

    def end_batch(self, failed: bool) -> bool:
        """Reduces the batch's gradients over the ranks, unless any rank has failed.

        Every rank calls it once per batch. Returns whether any rank has failed.
        """
        ...


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


def part_weights(pieces: list[Any], count: Count) -> list[float]:
    """The share of each part in its batch."""
    if len(pieces) == 1:
        return [1.0]
    samples = [float(count_samples(piece)) for piece in pieces]
    counts = samples
    if callable(count):
        counts = [float(count(piece)) for piece in pieces]
    elif count is not None:
        counts = [float((piece[count] != IGNORE_INDEX).sum()) for piece in pieces]
    if not sum(counts):
        counts = samples
    return [each / sum(counts) for each in counts]
