"""Checks a zip archive of `torch.save`: every record must be what was written."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from healcore import regular_file

_HEADER = struct.Struct("<4s5H3I2H")
"""The header of a record: signature, version, flags, method, time, date, CRC, sizes, lengths."""
_HAS_DESCRIPTOR = 8
"""Flag: CRC and sizes follow the record in a descriptor, as in all records that torch writes."""
_DESCRIPTORS = (struct.Struct("<4s3I"), struct.Struct("<4sI2Q"))
"""The descriptor: signature, CRC, sizes; the second form is for 4 GiB and more."""
_HEADER_START, _DESCRIPTOR_START = b"PK\x03\x04", b"PK\x07\x08"
_ZIP64 = 0xFFFFFFFF
"""Stands for a size that needs more than 32 bits."""
_MOST_PACKED = 16
"""Largest allowed ratio of unpacked to packed size; TorchScript compresses its source text."""
_DIRECTORY = 0x10


class ArchiveCheck(NamedTuple):
    """The result for an archive."""

    records: int
    damage: str | None
    """A sentence about the first damage that was found."""


def check_records(path: Path) -> ArchiveCheck:
    """Reads every record of an archive; refuses one that unpacks to much more than its size."""
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
        with open(path, "rb", opener=regular_file.opener) as file:
            for record in records:
                if not _agrees(file, record):
                    message = f"{record.filename} is listed as something else than it is"
                    return ArchiveCheck(len(records), message)
    except Exception as error:  # a flipped bit makes zipfile and zlib raise anything
        return ArchiveCheck(0, f"the archive is damaged: {error}")
    return ArchiveCheck(len(records), None)


def _agrees(file: BinaryIO, record: zipfile.ZipInfo) -> bool:
    """Whether a record's own header agrees with the archive's directory."""
    file.seek(record.header_offset)
    header = _HEADER.unpack(file.read(_HEADER.size))
    start, version, flags, method, _, _, crc, packed, size, named, more = header
    listed = (record.extract_version, record.flag_bits, record.compress_type)
    # zipfile has compared the names.
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
        return True  # the signature is optional, and without it the layout is not known
    return any(
        layout.unpack_from(descriptor)[1:] == listed
        for layout in _DESCRIPTORS
        if len(descriptor) >= layout.size
    )
