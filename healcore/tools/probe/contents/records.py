"""The parts of a torch file: is each no more, and no less, than its tensors need?

`torch.load(mmap=True)` does not ask, and a tensor would go on in what lies behind its record.
"""

from __future__ import annotations

import mmap
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from healcore.runtime.inert_pickle import BadPickle, read
from healcore.tools.probe.contents.torch_pickle import Storage, storages
from healcore.tools.probe.verdict import Damaged, ProbeError

_MAGIC = 0x1950A86A20F9469CFC6C
"""With which a file of torch before 1.6 begins, pickled."""


_BYTE_ORDER = zlib.crc32(sys.byteorder.encode()), len(sys.byteorder)
"""Checksum and size of a record that says that numbers are those of this machine."""


class Checked(NamedTuple):
    """An archive whose records are as its pickle has them."""

    pickled: int
    """Bytes of the pickle."""
    value: Any
    """What the pickle is, as data."""
    archive: zipfile.ZipFile
    root: str

    def content(self, storage: Storage) -> bytes | None:
        """The bytes of a storage; None if they are not those of this machine, or not there."""
        order = self.archive.getinfo(f"{self.root}/byteorder")
        if (order.CRC, order.file_size) != _BYTE_ORDER:  # the list tells, without reading it
            return None
        return self.archive.read(f"{self.root}/data/{storage.key}")


def check_archive(archive: zipfile.ZipFile, name: str, size: int) -> Checked:
    """Holds the records of an archive against the storages that its pickle names.

    Takes time and memory in proportion to the size of the pickle and of the archive's list.

    Args:
        archive: open.
        name: of it, for messages.
        size: its bytes.

    Raises:
        Damaged: a record is too short.
        ProbeError: it is none of torch.save's, which packs nothing and names no record twice.
        pickle.UnpicklingError: see `storages`.
        Exception: whatever a damaged archive or pickle makes Python raise.
    """
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ProbeError(f"{name} has compressed records, which torch.save does not write")
    if sum(record.file_size for record in records) > size:
        raise Damaged(f"{name} lists more bytes in its records than the file has")
    root = records[0].filename.partition("/")[0]
    sizes = {record.filename: record.file_size for record in records}
    # To torch's reader capitals are the same as small letters.
    if len({record.lower() for record in sizes}) != len(records):
        raise Damaged(f"{name} has two records of one name")
    pickled = archive.read(f"{root}/data.pkl")
    found = storages(pickled)
    for key, storage in found.storages.items():
        there = sizes.get(f"{root}/data/{key}")
        if there is not None and there < storage.bytes:
            raise Damaged(
                f"{name}: the record data/{key} is shorter than its tensor: {there} of "
                f"{storage.bytes} bytes"
            )
    return Checked(len(pickled), found.value, archive, root)


def check_legacy(path: Path) -> int:
    """The same for a file of torch before 1.6: five pickles, and the storages behind them.

    Raises:
        ProbeError: it is no such file, or names more storage than it has bytes.
        pickle.UnpicklingError: see `storages`.
        BadPickle: a pickle is damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, at = read(data)
        if magic != _MAGIC:
            raise BadPickle("it does not begin as a file of torch does")
        for _ in range(2):  # the version of the protocol, and of the system
            _, at = read(data, at)
        _, needed, end = storages(data, at)
        if sum(storage.bytes for storage in needed.values()) > len(data):
            raise ProbeError(f"{path} is cut short: it has fewer bytes than its tensors need")
        keys, _ = read(data, end)
        if type(keys) is not list or any(type(key) is not str for key in keys):
            raise BadPickle("its list of storages is none")
        return end - at
