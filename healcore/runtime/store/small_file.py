"""The arrays of a small checkpoint as one file of safetensors.

DCP and Orbax make several files and threads for each checkpoint. For a state of kilobytes that
takes more of the processor than all the rest of a save. So the arrays of such a state are one file
of safetensors in their place, which the library writes and reads:

    safetensors.torch.load_file("step-0000000140.1/data/arrays.safetensors")["model.0.weight"]
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import safetensors

from healcore import regular_file
from healcore.runtime.store.state_copy import HostCopy

FILE = "arrays.safetensors"
"""Name of the file in the directory of the arrays."""
MAX_BYTES = 16 << 20
"""Largest size of the arrays of such a state. Above this size the fixed cost of DCP and Orbax is
small compared with the copying."""
_MAX_FILE_BYTES = 1 << 28
"""Largest size of a file that is read, with the names of the arrays."""
DTYPES = frozenset({
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2",
})  # fmt: skip
"""Dtypes that each version of safetensors reads and writes, for each framework."""


def fits(copy: HostCopy, limit: int, dtypes: Collection[str] = DTYPES) -> bool:
    """Whether the arrays of a copy have at most `limit` bytes, and these dtypes.

    The key of the metadata is no name of an array, and JSON holds no half of a surrogate pair.
    """
    if copy.nbytes > limit:
        return False
    for name, leaf in copy.flat.leaves.items():
        if leaf.dtype not in dtypes or not name.isascii() or name == "__metadata__":
            return False
    return True


def read(folder: Path) -> dict[str, np.ndarray] | None:
    """The bytes of each array, uint8 (n,), by name. None for a folder without such a file.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: the library rejects the file.
    """
    path = folder / FILE
    if not path.exists():
        return None
    found = safetensors.deserialize(regular_file.read(path, _MAX_FILE_BYTES))
    return {name: np.frombuffer(entry["data"], np.uint8) for name, entry in found}
