"""Splits a batch along its samples, for arrays of any framework.

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
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError


class UnsplittableBatch(HealcoreError, ValueError):
    """A batch without a common number of samples."""


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

    Args:
        batch: as described in the module.
        parts: number of parts. 1 returns the batch itself.

    Raises:
        UnsplittableBatch: as for `count_samples`.
        ValueError: `parts` is below 1 or above the number of samples.
    """
    if parts == 1:
        return [batch]
    samples = count_samples(batch)
    if not 1 <= parts <= samples:
        raise ValueError(f"parts is from 1 to the {samples} samples of the batch, not {parts}")
    ends = [samples * number // parts for number in range(parts + 1)]
    return [_cut(batch, slice(*ends[i : i + 2]), samples) for i in range(parts)]


# -- within ---------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """An array or a list that may be divided."""

    path: str
    value: Any
    rows: int | None
    """Length of the first axis of the array, or of the arrays in a list."""
    entries: int | None
    """Length of a list that may be a list of samples."""


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
