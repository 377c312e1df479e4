"""Reads the arrays of one Orbax item, as a script that `orbax.py` runs in its own process.

TensorStore allocates as much as a file asks for, and some damage ends the process, so it must not
be the caller's. Nothing of healcore is imported, which keeps the start fast.

Requests are lines of JSON on standard input: `{"open": NAME}` or `{"read": NAME}`. The answer to
"open" is one line of JSON; to "read", a line of JSON and the raw bytes for each piece, then a line
with "end". A line with "error" can take the place of any line.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import tensorstore

PIECE = 1 << 20


def spec(item: str, name: str, *, ocdbt: bool, zarr3: bool) -> dict[str, Any]:
    """The TensorStore spec of an array."""
    base = {"driver": "file", "path": f"{item}/"}
    if ocdbt:
        store: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{item}/{name}/"}
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store}


def boxes(shape: tuple[int, ...], chunk: Any) -> Iterator[tuple[slice, ...]]:
    """The chunks of an array in order; reading across chunks would decode some of them twice."""
    steps = [max(1, step or size) for size, step in zip(shape, chunk or shape, strict=True)]
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(
            slice(at, min(at + step, size))
            for at, step, size in zip(corner, steps, shape, strict=True)
        )


def pieces(opened: Any) -> Iterator[np.ndarray]:
    """The elements of an array, 1-d, in dtypes that NumPy can compare and add."""
    for box in boxes(tuple(opened.shape), opened.chunk_layout.read_chunk.shape):
        values = np.asarray(opened[box].read().result()).reshape(-1)
        for at in range(0, len(values), PIECE):
            piece = values[at : at + PIECE]
            # NumPy does not know the NaN of ml_dtypes' floats.
            yield piece if piece.dtype.kind in "fiubc" else piece.astype(np.float32)


def first_line(error: Exception) -> str:
    """The first line of an error message."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def serve(item: str, *, ocdbt: bool, zarr3: bool, requests: BinaryIO, out: BinaryIO) -> None:
    """Answers requests until standard input ends."""
    # Shared by all arrays, so that their common index is read once.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})

    def send(**what: Any) -> None:
        out.write(json.dumps(what).encode() + b"\n")

    kept: dict[str, Any] = {}
    for request in map(json.loads, requests):
        name = request.get("open") or request["read"]
        try:
            if name not in kept:
                what = spec(item, name, ocdbt=ocdbt, zarr3=zarr3)
                kept = {} if len(kept) > 1000 else kept
                kept[name] = tensorstore.open(what, open=True, read=True, context=context).result()
            opened = kept[name]
            if "open" in request:
                send(dtype=opened.dtype.name, shape=list(opened.shape))
            else:
                for piece in pieces(opened):
                    send(dtype=piece.dtype.str, bytes=piece.nbytes)
                    out.write(np.ascontiguousarray(piece).data)
                send(end=True)
        except Exception as error:  # TensorStore raises ValueError for any damage
            send(error=first_line(error))
        out.flush()


def main() -> None:
    """Sets the limits of the process and answers requests."""
    options = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (options["memory"], options["memory"]))
    resource.setrlimit(resource.RLIMIT_CPU, (options["seconds"], options["seconds"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(
        options["item"],
        ocdbt=options["ocdbt"],
        zarr3=options["zarr3"],
        requests=sys.stdin.buffer,
        out=sys.stdout.buffer,
    )


if __name__ == "__main__":
    main()
