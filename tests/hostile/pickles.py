"""Pickles written opcode by opcode, and files of torch and DCP around them."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

BEGIN, END = b"\x80\x02", b"."


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(path: str) -> bytes:
    """A class or a function, by the name to import it by."""
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def called(path: str, *args: bytes) -> bytes:
    return named(path) + b"(" + b"".join(args) + b"tR"


def torch_file(path: Path, pickled: bytes) -> Path:
    """A file of torch with this pickle in it."""
    with zipfile.ZipFile(path, "w") as archive:
        parts = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
        for name, content in parts.items():
            archive.writestr(f"archive/{name}", content)
    return path


def dcp(folder: Path, index: bytes | None = None, **state: Any) -> Path:
    """A directory of DCP; of what is given, or of a state."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state or {"w": torch.ones(8)}, checkpoint_id=folder, no_dist=True)
    if index is not None:
        (folder / ".metadata").write_bytes(index)
    return folder


def packed(state: Any, **options: Any) -> bytes:
    """The bytes that torch.save writes for a value."""
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()
