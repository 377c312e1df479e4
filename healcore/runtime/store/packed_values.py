"""`PackedValues`: nested values as text, and the bytes of all their arrays in one array.

`values.dumps` writes arrays into the text as base64. That is fine for random states; for batches of
megabytes it would take longer than the save of a small model. Here an array costs one copy of its
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError, UnsavableState

_MIN_BYTES = 4096
"""Smallest size of the array in bytes. Larger sizes are this number times a power of two, so that
the size rarely changes: a store reuses the memory of its last copy as long as all arrays keep their
sizes."""


class PackedValues:
    """Values by number, packed for a checkpoint.

        packed = PackedValues(limit=16 << 20)
        packed.add(120, {"x": np.ones(3)})
        PackedValues.read(packed.state())  # {120: {"x": array([1., 1., 1.])}}

    Args:
        limit: approximate max bytes of all values. A value that does not fit is not added.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: dict[int, str] = {}
        self._parts: list[np.ndarray] = []
        self._size = 0
        """Bytes of the parts."""

    def __contains__(self, number: int) -> bool:
        return number in self._texts

    def add(self, number: int, value: Any, path: values.Path) -> bool:
        """Adds a value of arrays, numbers, texts and containers.

        Args:
            number: the number of the value.
            value: the value. Its arrays are not copied before `state`.
            path: place of the value in the state, for error messages.

        Returns:
            False for a value without a plain form, and where no room is left.
        """
        parts: list[np.ndarray] = []
        size = self._size

        def keep(data: np.ndarray) -> Any:
            nonlocal size
            parts.append(data)
            size += data.size
            return [size - data.size, size]

        try:
            text = values.dumps(value, path, keep=keep)
        except UnsavableState:
            return False
        if size + sum(map(len, self._texts.values())) + len(text) > self._limit:
            return False
        self._texts[number] = text
        self._parts += parts
        self._size = size
        return True

    def state(self) -> dict[str, Any]:
        """The values for a checkpoint.

        Returns:
            "texts", number -> text; and "bytes", one uint8 array (n,) with the bytes of all arrays.
            Its size is a power of two, so that it mostly stays the same from save to save.
        """
        capacity = _MIN_BYTES
        while capacity < self._size:
            capacity *= 2
        data = np.zeros(capacity, np.uint8)
        if self._parts:
            np.concatenate(self._parts, out=data[: self._size])
        texts = {str(number): text for number, text in self._texts.items()}
        return {"texts": texts, "bytes": data}

    @staticmethod
    def read(state: Mapping[str, Any], path: values.Path = ("values",)) -> dict[int, Any]:
        """Reads the values of a `state`.

        Args:
            state: result of `state`, from a checkpoint that anybody may have written.
            path: place of the values in the state, for error messages.

        Returns:
            Number -> value.

        Raises:
            StoreError: healcore has not written this state.
        """
        data = np.asarray(state["bytes"])

        def part(place: Any) -> np.ndarray:
            start, stop = place
            if not 0 <= start <= stop <= data.size:
                raise StoreError(f"{values.path_text(path)} has no bytes {start} to {stop}")
            return data[start:stop]

        found: dict[int, Any] = {}
        for number, text in state["texts"].items():
            found[int(number)] = values.loads(text, path, bytes_at=part)
        return found
