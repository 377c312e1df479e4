"""The zip archive that a file of `torch.save` is: is every record of it what was written?"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

_BEFORE = struct.Struct("<4s5H3I2H")
"""What stands before a record: signature, version, flags, method, time, date, CRC, sizes, ..."""
_AFTERWARDS = 8
"""The flag of a record whose CRC and sizes stand behind it; torch writes all of them so."""
_BEHIND = (struct.Struct("<4s3I"), struct.Struct("<4sI2Q"))
"""What then stands there: signature, CRC, sizes; those of 4 GiB and more are longer."""
_BEGINS, _ENDS = b"PK\x03\x04", b"PK\x07\x08"
_ZIP64 = 0xFFFFFFFF
"""In the place of a size that needs more than 32 bits."""
_MOST_PACKED = 16
"""Times its size that an archive may unpack to; TorchScript packs its source text."""
_DIRECTORY = 0x10
"""The attribute of MS-DOS."""


class Examined(NamedTuple):
    """What was found in an archive."""

    records: int
    damage: str | None
    """The first thing that is not as it was written, in words."""


def examined(path: Path) -> Examined:
    """Reads every record of an archive, in time in proportion to its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            unpacked, size = sum(record.file_size for record in records), path.stat().st_size
            if unpacked > _MOST_PACKED * size + (1 << 20):
                told = (
                    f"it would unpack to {unpacked} bytes, and is not torch's: that packs nothing"
                )
                return Examined(0, told)
            damaged = archive.testzip()
            if damaged is not None:
                told = f"{damaged} is not what was written: its CRC-32 differs"
                return Examined(len(records), told)
        with path.open("rb") as file:
            for record in records:
                if not _agrees(file, record):
                    told = f"{record.filename} is listed as something else than it says itself"
                    return Examined(len(records), told)
    except Exception as error:  # a flipped bit makes zipfile and zlib raise anything
        return Examined(0, f"the archive is damaged: {error}")
    return Examined(len(records), None)


def _agrees(file: BinaryIO, record: zipfile.ZipInfo) -> bool:
    """Whether what stands at a record is what the archive's list has of it."""
    file.seek(record.header_offset)
    before = _BEFORE.unpack(file.read(_BEFORE.size))
    start, version, flags, method, _, _, crc, packed, size, named, more = before
    listed = (record.extract_version, record.flag_bits, record.compress_type)
    # Python itself holds the names against each other.
    if start != _BEGINS or (version, flags, method) != listed:
        return False
    if record.external_attr & _DIRECTORY and record.file_size:
        return False
    listed = (record.CRC, record.compress_size, record.file_size)
    if not flags & _AFTERWARDS:
        pairs = zip((crc, packed, size), listed, strict=True)
        return all(own in (theirs, _ZIP64) for own, theirs in pairs)
    file.seek(named + more + record.compress_size, 1)
    behind = file.read(_BEHIND[-1].size)
    if not behind.startswith(_ENDS):
        return True  # the signature, and so where it ends, is not every writer's
    return any(
        layout.unpack_from(behind)[1:] == listed for layout in _BEHIND if len(behind) >= layout.size
    )
