"""The parts of a batch, and what a framework does to repeat the batches since the last step.

A batch is an array or a structure of arrays: dictionaries, tuples, dataclasses and lists. Arrays
are split along their first axis, by slicing: torch and NumPy give views. Lists with one entry for
each sample are split too: lists of dictionaries, of dataclasses, of values without arrays, and of
arrays whose first axes differ. (Arrays with equal first axes are a structure: torch's default
collate makes such lists.) Each part gets all other values whole: numbers, texts, arrays of one row.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.store.ranks import Ranks

Batch = TypeVar("Batch")
Count = Callable[[Any], Any] | str | None
"""How to count what a mean loss averages over: a function of a part, the key of its labels, or None
for its samples."""

_IGNORE_INDEX = -100  # label that does not count, as in torch's `cross_entropy`


class UnsplittableBatch(HealcoreError, ValueError):
    """A batch without a common number of samples."""


class MicrobatchError(HealcoreError, RuntimeError):
    """The loop over the parts of a batch does not have the required form.

    After memory ran out, healcore repeats the loop with smaller parts. That is only correct if each
    part is used in a `with` block, and if the optimizer steps after the last part.
    """

    __module__ = "healcore.errors"


@dataclass(eq=False, repr=False)
class Microbatch(Generic[Batch]):
    """A part of a batch: a context manager for its forward and backward pass.

        for batch in healer.batches(loader):
            for part in healer.microbatches(batch):
                with part:
                    loss = healer.loss(part.batch)
                    (loss * part.weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    If memory runs out within the block, the block ends without the exception, and the loop gets the
    batches since the last optimizer step again, in smaller parts.

    Attributes:
        batch: the samples of the part, in the structure of the whole batch.
        weight: share of the batch's samples or tokens in the part: the factor for a mean loss.
        first: whether the part begins a sum of gradients, also when the window is repeated.
        last: whether it is the last part of the batches so far.
        failed: whether memory ran out, here or on another rank, and the window is repeated.
    """

    batch: Batch
    weight: float
    first: bool
    last: bool
    _on_exit: Callable[[BaseException | None], bool]
    failed: bool = field(default=False, init=False)
    entered: bool = field(default=False, init=False)

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
    """The gradients of a window, which is all parts since the last optimizer step.

    The adapter of a framework implements it:

        begin_window ── part ── part ── optimizer step         has_stepped: the window is over
              ▲                  │
              └── redo_window ◄──┘  memory ran out: from the beginning, in smaller parts
    """

    def is_accumulating(self) -> bool:
        """Whether any gradients have not been used by an optimizer step."""
        ...

    def begin_window(self) -> None:
        """Called before the first part since the last step."""

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`."""
        ...

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Restores the state of `begin_window` and frees the memory of the failed part.

        Args:
            kept_alive: values that variables of the loop still refer to.
            clear_cache: whether to return unused memory of the framework's allocator.
        """

    def join_ranks(self, ranks: Ranks) -> str:
        """Prepares several ranks to repeat windows together.

        Returns:
            The reason why they cannot, or an empty string.
        """
        ...

    def begin_parts(self) -> None:
        """Called by joined ranks before the parts of each batch."""

    def end_parts(self, failed: bool) -> bool:
        """Called by joined ranks after the parts of each batch, or after a part has failed.

        Returns:
            Whether a part has failed on any rank.
        """
        return failed


def count_samples(batch: Any) -> int:
    """Counts the samples of a batch. Reads shapes only, so it does not wait for a device.

    Args:
        batch: an array, or a structure of arrays, as the module describes.

    Returns:
        The number of samples, at least 0.

    Raises:
        UnsplittableBatch: the batch has no samples, or its arrays disagree on their number.
    """
    lengths: set[int] = set()

    def collect(value: Any) -> Any:
        lengths.add(_length(value))
        return value

    _mapped(batch, collect)
    if len(lengths) > 1:
        lengths.discard(1)  # one row serves all samples
    if len(lengths) == 1:
        return lengths.pop()
    raise UnsplittableBatch(
        "a batch is split along the first axis of its arrays, which must be equally long, or is a "
        f"list of samples; {batch!r:.80} of type {type(batch).__name__} has the lengths "
        f"{sorted(lengths)}: use arrays of one length, and a first axis of length 1 for arrays "
        "that belong to no sample"
    )


def split(batch: Any, parts: int) -> list[Any]:
    """Splits a batch into parts of the same structure, whose sizes differ by at most one sample.

    Args:
        batch: an array, or a structure of arrays, as the module describes.
        parts: number of parts, at most the number of samples; 1 returns the batch itself.

    Returns:
        The parts, in the order of the samples. Arrays in them are views where the framework's
        slices are.

    Raises:
        UnsplittableBatch: as for `count_samples`.

    Examples:
        >>> import numpy as np
        >>> split({"ids": np.arange(5), "scale": 2.0}, 2)
        [{'ids': array([0, 1]), 'scale': 2.0}, {'ids': array([2, 3, 4]), 'scale': 2.0}]
    """
    if parts == 1:
        return [batch]
    samples = count_samples(batch)
    pieces = []
    for number in range(parts):
        rows = slice(samples * number // parts, samples * (number + 1) // parts)
        pieces.append(_mapped(batch, partial(_rows_of, rows, samples)))
    return pieces


def weighted_parts(batch: Any, parts: int, count: Count) -> list[tuple[Any, float]]:
    """Splits a batch into parts, each with its share of the batch.

    The sum of the parts' mean losses, each times its share, is the mean loss of the whole batch. A
    loss that averages over tokens needs the shares of tokens: parts of equally many samples may
    have unequally many of them. A part of share 0 is left out: it has a mean loss of NaN.

    Args:
        batch: as for `split`.
        parts: as for `split`.
        count: see `Count`. Labels of -100 do not count, as in torch's cross-entropy.

    Returns:
        The parts with their shares, whose sum is 1. By samples if nothing is counted in any part.
    """
    if parts == 1:
        return [(batch, 1.0)]
    pieces = split(batch, parts)
    if callable(count):
        counts = [float(count(piece)) for piece in pieces]
    elif count is not None:
        counts = [float((piece[count] != _IGNORE_INDEX).sum()) for piece in pieces]
    if count is None or not sum(counts):
        counts = [float(count_samples(piece)) for piece in pieces]
    pairs = zip(pieces, counts, strict=True)
    return [(piece, number / sum(counts)) for piece, number in pairs if number]


def clear_frames(error: BaseException) -> list[Any]:
    """Clears the variables of functions that an exception has ended.

    The traceback of an exception keeps the frames of its functions, and so the activations of the
    failed part. Without clearing them, the smaller parts would run out of memory too.

    Args:
        error: the exception. The exceptions that it was raised from, or during, are cleared too.

    Returns:
        The values of variables of functions that still run, which cannot be cleared.
    """
    held: list[Any] = []
    pending = [error]
    seen: set[int] = set()  # ids: the chain of exceptions may have a circle
    while pending:
        exception = pending.pop()
        if id(exception) in seen:
            continue
        seen.add(id(exception))
        for earlier in (exception.__cause__, exception.__context__):
            if earlier is not None:
                pending.append(earlier)
        traceback.clear_frames(exception.__traceback__)
        for frame, _ in traceback.walk_tb(exception.__traceback__):
            variables = frame.f_locals
            held += variables.values()
            if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables.clear()  # a copy before Python 3.13, which the frame keeps
    return held


# -- structures of arrays -------------------------------------------------------------------------


def _mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """The structure with each array and each list of samples replaced by `change(value)`."""
    if _is_array(node):
        return change(node)
    children = _children(node)
    if children is None:
        return node
    is_list = isinstance(node, list | tuple)
    if is_list and _are_samples(node):
        return change(node)
    for name, child in children.items():
        children[name] = _mapped(child, change)
    if hasattr(node, "_fields"):  # a named tuple
        return type(node)(*children.values())
    if is_list:
        return type(node)(children.values())
    if isinstance(node, Mapping) and not isinstance(node, MutableMapping):
        return children
    changed = copy.copy(node)  # keeps attributes of a subclass
    for name, child in children.items():
        if isinstance(node, Mapping):
            changed[name] = child
        else:
            object.__setattr__(changed, name, child)
    return changed


def _children(node: Any) -> dict[Any, Any] | None:
    """The values in a structure by their names or numbers, or None for another value."""
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {each.name: getattr(node, each.name) for each in dataclasses.fields(node)}
    return None


def _are_samples(node: Any) -> bool:
    """Whether a list or tuple has one entry for each sample, and is no structure of arrays."""
    if hasattr(node, "_fields") or not node:
        return False
    if all(map(_is_array, node)):
        return len({each.shape[0] for each in node} - {1}) > 1
    if any(map(_is_array, node)):
        return False
    are_records = all(not isinstance(each, list) and _children(each) is not None for each in node)
    return (are_records and isinstance(node, list)) or not _holds_array(node)


def _length(value: Any) -> int:
    """The number of rows of an array, or of entries of a list."""
    if _is_array(value):
        return value.shape[0]
    return len(value)


def _rows_of(rows: slice, samples: int, value: Any) -> Any:
    """Some rows of an array or list, or the whole of one that serves all samples."""
    if _length(value) == samples:
        return value[rows]
    return value


def _is_array(node: object) -> bool:
    """Whether a value is an array with at least one axis, of any library."""
    return len(getattr(node, "shape", ())) > 0 and hasattr(node, "__getitem__")


def _holds_array(node: object) -> bool:
    """Whether a value is an array, or a structure with an array in it."""
    children = _children(node)
    return _is_array(node) or (children is not None and any(map(_holds_array, children.values())))
