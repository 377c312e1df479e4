"""Archives of torch as data."""

from __future__ import annotations

import io
import sys
import zipfile

import pytest
import torch

from healcore.torch.checkpoint_pickle import Storage, check_archive


@pytest.mark.parametrize("order", ["little", "big", None])
def test_the_byte_order_of_an_archive(order):
    """Torch before 2.1 wrote none; such a file is little-endian."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(4.0), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w") as new:
        for record in old.namelist():
            if not record.endswith("/byteorder"):
                new.writestr(record, old.read(record))
            elif order is not None:
                new.writestr(record, order)
    with zipfile.ZipFile(changed) as archive:
        checked = check_archive(archive, "archive", changed.getbuffer().nbytes)
        content = checked.content(Storage("0", "FloatStorage", 4, 16))
    native = (order or "little") == sys.byteorder
    assert content == (torch.arange(4.0).numpy().tobytes() if native else None)
