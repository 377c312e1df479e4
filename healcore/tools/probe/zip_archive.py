"""The zip archive that a file of `torch.save` is: is every record of it what was written?"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

_HEADER = struct.Struct("<4s5H3I2H")
"""Before a record: signature, version, flags, method, time, date, CRC, sizes, lengths."""
_HAS_DESCRIPTOR = 8
"""The flag of a record whose CRC and sizes follow it; torch writes all of them so."""
_DESCRIPTORS = (struct.Struct("<4s3I"), struct.Struct("<4sI2Q"))
"""What then follows: signature, CRC, sizes; those of 4 GiB and more are longer."""
_HEADER_START, _DESCRIPTOR_START = b"PK\x03\x04", b"PK\x07\x08"
_ZIP64 = 0xFFFFFFFF
"""In the place of a size that needs more than 32 bits."""
_MOST_PACKED = 16
"""Times its size that an archive may unpack to; TorchScript packs its source text."""
_DIRECTORY = 0x10
"""The attribute of MS-DOS."""


class ArchiveCheck(NamedTuple):
    """What was found in an archive."""

    records: int
    damage: str | None
    """A sentence about the first thing that is not as it was written."""


def check_records(path: Path) -> ArchiveCheck:
    """Reads every record of an archive, in time in proportion to its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            unpacked, size = sum(record.file_size for record in records), path.stat().st_size
            if unpacked > _MOST_PACKED * size + (1 << 20):
                return ArchiveCheck(
                    0,
                    f"it would unpack to {unpacked} bytes, and is not torch's: that packs nothing",
                )
            damaged = archive.testzip()
            if damaged is not None:
                message = f"{damaged} is not what was written: its CRC-32 differs"
                return ArchiveCheck(len(records), message)
        with path.open("rb") as file:
            for record in records:
                if not _agrees(file, record):
                    message = f"{record.filename} is listed as something else than it is"
                    return ArchiveCheck(len(records), message)
    except Exception as error:  # a flipped bit makes zipfile and zlib raise anything
        return ArchiveCheck(0, f"the archive is damaged: {error}")
    return ArchiveCheck(len(records), None)


def _agrees(file: BinaryIO, record: zipfile.ZipInfo) -> bool:
    """Whether a record's own header agrees with the archive's list."""
    file.seek(record.header_offset)
    header = _HEADER.unpack(file.read(_HEADER.size))
    start, version, flags, method, _, _, crc, packed, size, named, more = header
    listed = (record.extract_version, record.flag_bits, record.compress_type)
    # Python itself compares the names.
    if start != _HEADER_START or (version, flags, method) != listed:
        return False
    if record.external_attr & _DIRECTORY and record.file_size:
        return False
    listed = (record.CRC, record.compress_size, record.file_size)
    if not flags & _HAS_DESCRIPTOR:
        pairs = zip((crc, packed, size), listed, strict=True)
        return all(own in (theirs, _ZIP64) for own, theirs in pairs)
    file.seek(named + more + record.compress_size, 1)
    descriptor = file.read(_DESCRIPTORS[-1].size)
    if not descriptor.startswith(_DESCRIPTOR_START):
        return True  # not every writer has the signature, and its end is not known without
    return any(
        layout.unpack_from(descriptor)[1:] == listed
        for layout in _DESCRIPTORS
        if len(descriptor) >= layout.size
    )
