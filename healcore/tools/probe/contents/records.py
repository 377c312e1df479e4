"""The records of a torch file: does each have the bytes that its tensor needs?

`torch.load(mmap=True)` does not ask, and a tensor would go on in what lies behind its record.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

from healcore.tools.probe.verdict import Damaged

_WIDTHS = {
    "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "UntypedStorage": 1, "ShortStorage": 2,
    "HalfStorage": 2, "BFloat16Storage": 2, "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8,
    "DoubleStorage": 8, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16,
}  # fmt: skip
"""Bytes of an element."""


def check_records(path: Path) -> None:
    """Holds the records of an archive against the storages that its pickle names.

    Raises:
        Damaged: one is too short.
        Exception: whatever a damaged archive or pickle makes Python raise.
    """
    with zipfile.ZipFile(path) as archive:
        sizes = {record.filename: record.file_size for record in archive.infolist()}
        root = next(name for name in sizes if name.endswith("/data.pkl")).removesuffix("data.pkl")
        with archive.open(f"{root}data.pkl") as file:
            reader = _Storages(file)
            reader.load()
    for key, needed in reader.needed.items():
        there = sizes.get(f"{root}data/{key}")
        if there is not None and there < needed:
            raise Damaged(
                f"{path}: the record data/{key} is shorter than its tensor: {there} of {needed} "
                "bytes"
            )


class _Inert:
    """Stands for every object in a pickle: takes whatever it is given and does nothing."""

    width = 0

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None:
        """As of a list."""

    def add(self, _: Any) -> None:
        """As of a set."""


class _Storages(pickle.Unpickler):
    """Reads which storages a pickle names, and makes nothing from it."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.needed: dict[str, int] = {}
        """Key of the record -> bytes."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {"width": _WIDTHS.get(name, 0)})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, elements = pid
        needed = int(elements) * int(getattr(kind, "width", 0))
        self.needed[str(key)] = max(needed, self.needed.get(str(key), 0))
        return _Inert()
