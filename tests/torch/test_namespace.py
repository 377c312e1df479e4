"""The torch namespace agrees with NumPy on what the core calls it with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from healcore.torch import namespace

XP = namespace.on("cpu")
F, I32, B = np.float32, np.int32, np.bool_


def test_sqrt_is_correctly_rounded():
    values = np.random.default_rng(0).random(200_000, dtype=np.float32) * 100
    ours = XP.sqrt(torch.from_numpy(values)).numpy()
    assert (ours == np.sqrt(values)).all()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("where", (B(True), F(1.5), 0.0)),
        ("where", (B(False), 2.5, F(1.0))),
        ("where", (B(True), I32(3), 0)),
        ("where", (np.array([True, False]), F(1.0), np.array([2.0, 3.0], F))),
        ("abs", (F(-2.0),)),
        ("isfinite", (np.array([1.0, np.nan, np.inf], F),)),
        ("sqrt", (F(2.0),)),
    ],
)
def test_as_in_numpy(name: str, args: tuple[Any, ...]):
    wanted = getattr(np, name)(*args)
    given = [
        torch.from_numpy(np.array(a)) if isinstance(a, np.generic | np.ndarray) else a for a in args
    ]
    found = getattr(XP, name)(*given)
    np.testing.assert_array_equal(found.numpy(), wanted)
    assert found.numpy().dtype == np.asarray(wanted).dtype


def test_sums_and_casts():
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert XP.sum(x, axis=-1).tolist() == [3, 7]
    assert XP.cumsum(x, axis=-1).tolist() == [[1, 3], [3, 7]]
    assert XP.astype(x, XP.float32).dtype is torch.float32
    assert XP.astype(x, XP.int32) is x
    assert XP.arange(3, dtype=XP.int32).dtype is torch.int32
    assert XP.asarray(np.float32(2.0)).dtype is torch.float32


def test_placed_arrays_are_made_on_their_device():
    xp = namespace.on("meta")
    assert xp.arange(3).device.type == "meta"
    assert "meta" in repr(xp)
    assert xp.asarray(np.ones(2, np.float32)).device.type == "meta"


def test_a_number_in_where_is_made_where_the_condition_is():
    """Copied over from the host it would wait for an accelerator."""
    made: list[tuple[str, Any]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            made.append((str(func), (kwargs or {}).get("device")))
            return func(*args, **(kwargs or {}))

    condition = torch.ones((), dtype=torch.bool, device="meta")
    with Record():
        XP.where(condition, torch.ones((), device="meta"), 0.5)
        XP.where(condition, 1.0, 0.0)
    assert all(device.type == "meta" for _, device in made if device is not None)
    assert not [name for name, _ in made if "_to_copy" in name or "copy_" in name]
