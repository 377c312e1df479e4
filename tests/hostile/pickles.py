"""Pickles written opcode by opcode, and files of torch and DCP around them."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

BEGIN, END = b"\x80\x02", b"."


def text(value: str) -> bytes:
    """A text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(path: str) -> bytes:
    """A class or a function, by the name to import it by."""
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def called(path: str, *args: bytes) -> bytes:
    """A call of a class or function."""
    return named(path) + b"(" + b"".join(args) + b"tR"


def number(value: int) -> bytes:
    """A whole number of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(data)) + data


def doubled(times: int) -> bytes:
    """A list of 2**times leaves that takes a few bytes per doubling."""
    data = b"]q\x00K\x01a"
    for at in range(1, times):
        data += b"]q" + bytes([at]) + b"(h" + bytes([at - 1]) * 1 + b"h" + bytes([at - 1]) + b"e"
    return data


def nested(times: int, opening: bytes = b"]", closing: bytes = b"a") -> bytes:
    """A list in a list in a list."""
    return opening * times + closing * (times - 1)


def torch_file(path: Path, pickled: bytes, records: dict[str, bytes] | None = None) -> Path:
    """A file of torch with this pickle in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for name, content in (records or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def storage(elements: int, key: str = "0", kind: str = "torch.FloatStorage") -> bytes:
    """A reference to a storage."""
    count = number(elements)
    return b"(" + text("storage") + named(kind) + text(key) + text("cpu") + count + b"tQ"


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], elements: int) -> bytes:
    """A tensor of that storage."""
    shapes = (b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (shape, strides))
    hooks = called("collections.OrderedDict")
    return called(
        "torch._utils._rebuild_tensor_v2", storage(elements), number(0), *shapes, b"\x89", hooks
    )


def dcp(folder: Path, index: bytes | None = None, **state: Any) -> Path:
    """A directory of DCP; of what is given, or of a state."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state or {"w": torch.ones(8)}, checkpoint_id=folder, no_dist=True)
    if index is not None:
        (folder / ".metadata").write_bytes(index)
    return folder


def changed_index(folder: Path, change: Any) -> Path:
    """A directory of DCP whose index is changed by a function, in torch's own terms."""
    at = folder / ".metadata"
    metadata = pickle.loads(at.read_bytes())
    change(metadata)
    at.write_bytes(pickle.dumps(metadata))
    return folder


def packed(state: Any) -> bytes:
    """The bytes that torch.save writes for a value."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
