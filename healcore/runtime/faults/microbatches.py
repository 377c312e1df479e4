"""The parts of a batch, and what a framework does to repeat the batches since the last step.

A batch is an array or a structure of arrays: dictionaries, tuples, dataclasses and lists. Arrays
are split along their first axis, by slicing: torch and NumPy give views. A list, and a tuple within
the batch, is either a structure or has one entry per sample:

- The entries are samples if all are dictionaries, tuples or dataclasses, or contain no array.
- Entries that are arrays are a structure if their first axes have equal length (torch's default
  collate makes such lists), else samples. Other arrays of the batch decide if both are possible.

Each part gets all other values whole: numbers, texts, arrays of one row, other lists.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
    """The loop over the parts of a batch does not have the required form."""


@dataclass(eq=False, repr=False)
class Microbatch(Generic[Batch]):
    """A part of a batch: a context manager for its forward and backward pass.

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
    """The gradients of a window, which is all parts since the last optimizer step."""

    def is_accumulating(self) -> bool:
        """Whether any gradients have not been used by an optimizer step."""
        ...

    def begin_window(self) -> None:
        """Called before the first part since the last step."""

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`."""
        ...

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Restores the state of `begin_window` and frees the memory of the failed part.

        Args:
            held: values that variables of the loop still refer to.
            clear_cache: whether to return unused memory of the framework's allocator.
        """

    def between_ranks(self, ranks: Ranks) -> Any:
        """The `DDPGradients` of torch, or a sentence why several ranks cannot repeat a window."""


def count_samples(batch: Any) -> int:
    """The number of samples of a batch. Reads shapes only.

    Raises:
        UnsplittableBatch: the batch has no samples, or its arrays disagree on their number.
    """
    leaves: list[_Leaf] = []

    def collect(leaf: _Leaf) -> Any:
        leaves.append(leaf)
        return leaf.value

    _mapped(batch, "", collect)
    return _samples(leaves, batch)


def split(batch: Any, parts: int) -> list[Any]:
    """Splits a batch into parts of the same structure, whose sizes differ by at most one sample.

    `parts` is at most the number of samples; 1 returns the batch itself.

    Raises:
        UnsplittableBatch: as for `count_samples`.
    """
    if parts == 1:
        return [batch]
    samples = count_samples(batch)
    ends = [samples * number // parts for number in range(parts + 1)]
    return [_cut(batch, slice(*ends[i : i + 2]), samples) for i in range(parts)]


def part_weights(pieces: list[Any], count: Count) -> list[float]:
    """The share of each part in its batch."""
    if len(pieces) == 1:
        return [1.0]
    samples = [float(count_samples(piece)) for piece in pieces]
    counts = samples
    if callable(count):
        counts = [float(count(piece)) for piece in pieces]
    elif count is not None:
        counts = [float((piece[count] != _IGNORE_INDEX).sum()) for piece in pieces]
    if not sum(counts):
        counts = samples
    return [each / sum(counts) for each in counts]


def clear_frames(error: BaseException) -> list[Any]:
    """Clears the variables of functions that an exception has ended.

    Returns the values of variables of functions that still run, which cannot be cleared.
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


class _Leaf(NamedTuple):
    """An array or a list that may be divided."""

    path: str
    value: Any
    rows: int | None  # length of the first axis of the array, or of the arrays in a list
    entries: int | None  # length of a list that may be a list of samples


def _mapped(node: Any, path: str, change: Callable[[_Leaf], Any]) -> Any:
    """The structure with each leaf replaced by `change(leaf)`."""

    def child(name: Any, value: Any) -> Any:
        return _mapped(value, f"{path}.{name}" if path else str(name), change)

    if _is_array(node):
        return change(_Leaf(path, node, node.shape[0], None))
    if isinstance(node, list) or (type(node) is tuple and path):
        leaf = _list_leaf(path, node)
        if leaf is not None:
            return change(leaf)
    if isinstance(node, (list, tuple)):
        inner = [child(i, value) for i, value in enumerate(node)]
        return type(node)(*inner) if hasattr(node, "_fields") else type(node)(inner)
    if isinstance(node, Mapping):
        entries = {name: child(name, value) for name, value in node.items()}
        if not isinstance(node, MutableMapping):
            return type(node)(entries)  # type: ignore[call-arg]
        changed = copy.copy(node)  # keeps attributes of a subclass
        for name, value in entries.items():
            changed[name] = value
        return changed
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        changed = copy.copy(node)
        for field in dataclasses.fields(node):
            object.__setattr__(changed, field.name, child(field.name, getattr(node, field.name)))
        return changed
    return node


def _list_leaf(path: str, node: Any) -> _Leaf | None:
    """A list or an inner tuple as a leaf, or None if it is a structure."""
    if not node:
        return None
    if all(map(_is_array, node)):
        return _Leaf(path, node, _common(array.shape[0] for array in node), len(node))
    records = all(isinstance(e, (Mapping, tuple)) or dataclasses.is_dataclass(e) for e in node)
    return _Leaf(path, node, None, len(node)) if records or not _holds_array(node) else None


def _samples(leaves: list[_Leaf], batch: Any) -> int:
    """The number of samples by the arrays, else by the lists of samples, else by other lists."""
    arrays = [leaf for leaf in leaves if leaf.entries is None]
    lists = [leaf for leaf in leaves if leaf.rows is None]
    others = [leaf for leaf in leaves if leaf.rows is not None]
    for group in (arrays, lists, others):
        lengths = [leaf.rows if leaf.rows is not None else leaf.entries or 0 for leaf in group]
        samples = _common(lengths)
        if samples is not None:
            return samples
        if group:
            shown = ", ".join(
                f"{leaf.path or 'the batch'} has {length}"
                for leaf, length in zip(group, lengths, strict=True)
            )
            raise UnsplittableBatch(
                "a batch is split along the first axis of its arrays, which must be equally long, "
                f"and here {shown}: use arrays of one length, and a first axis of length 1 for "
                "arrays that belong to no sample"
            )
    raise UnsplittableBatch(
        "a batch is split along the first axis of its arrays, or is a list of samples; "
        f"{batch!r:.80} of type {type(batch).__name__} has neither: pass arrays in dictionaries, "
        "tuples, lists or dataclasses"
    )


def _cut(batch: Any, part: slice, samples: int) -> Any:
    def change(leaf: _Leaf) -> Any:
        if leaf.entries is None or leaf.rows == samples:
            arrays = [leaf.value] if leaf.entries is None else leaf.value
            cut = [array[part] if array.shape[0] == samples else array for array in arrays]
            return cut[0] if leaf.entries is None else type(leaf.value)(cut)
        return leaf.value[part] if leaf.entries == samples else leaf.value

    return _mapped(batch, "", change)


def _common(lengths: Iterable[int]) -> int | None:
    """The common length, or None. Length 1 fits any other length: one row serves all samples."""
    distinct = set(lengths)
    distinct = distinct - {1} or distinct
    return distinct.pop() if len(distinct) == 1 else None


def _is_array(node: Any) -> bool:
    return len(getattr(node, "shape", ())) > 0 and hasattr(node, "__getitem__")


def _holds_array(node: Any) -> bool:
    if isinstance(node, Mapping):
        node = node.values()
    elif dataclasses.is_dataclass(node):
        node = [getattr(node, field.name) for field in dataclasses.fields(node)]
    elif not isinstance(node, (list, tuple)):
        return _is_array(node)
    return any(map(_holds_array, node))
