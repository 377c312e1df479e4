"""Each array namespace has the functions of the core with the same bits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import healcore.jax.compilation  # registers the namespace of its arrays
import healcore.torch.array_namespace  # noqa: F401
from healcore.core.array_namespace import ArrayNamespace, xp
from healcore.core.clipping import EDGES
from healcore.core.tape import to_program

_RANDOM = np.random.default_rng(66)
_SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 3e-30, 1e30, np.inf, -np.inf, np.nan], np.float32
)
X = np.concatenate([_RANDOM.normal(size=500), _SPECIAL]).astype(np.float32)
Y = np.concatenate([_RANDOM.normal(size=500), _SPECIAL[::-1]]).astype(np.float32)
COUNTS = np.arange(1, len(X) + 1, dtype=np.int32)
WHEN = X > Y
NONZERO = np.where(Y == 0, np.float32(2), Y)
SMALL = np.clip(np.nan_to_num(X), -1e15, 1e15)

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "where": (lambda x, y: xp.where(x > y, x, y), (X, Y)),
    "where, a number": (lambda x: xp.where(x > 0, 1.0, x), (X,)),
    "minimum": (lambda x, y: xp.minimum(x, y), (X, Y)),
    "minimum, a number": (lambda x: xp.minimum(x, 0.3), (X,)),
    "maximum": (lambda x, y: xp.maximum(x, y), (X, Y)),
    "clip": (lambda x: xp.clip(x, -0.3, 0.7), (X,)),
    "sqrt": (lambda x: xp.sqrt(abs(x)), (SMALL,)),
    "sum": (lambda n: xp.sum(n, -1), (COUNTS,)),
    "cumsum": (lambda n: xp.cumsum(n, -1), (COUNTS,)),
    "as_float": (lambda n: xp.as_float(n), (COUNTS,)),
    "as_int": (lambda c: xp.as_int(c), (WHEN,)),
    "places": (lambda n: xp.places(n) + n, (COUNTS,)),
    "table": (lambda x: xp.table(EDGES, x)[: len(X)] + x, (X,)),
    "flush": (lambda x: xp.flush(x), (X,)),
    "flush, a limit": (lambda x: xp.flush(x, 1e-12), (X,)),
    "product": (lambda x, y: xp.product(x, y), (SMALL, SMALL[::-1])),
    "product, a number": (lambda x: xp.product(0.1, x), (SMALL,)),
    "quotient": (lambda x, y: xp.quotient(x, y), (X, NONZERO)),
    "flag": (lambda c: xp.flag(c, 12), (WHEN,)),
    "flag of 1": (lambda c: xp.flag(c, 1), (WHEN,)),
    "with_slot": (
        lambda values, value: xp.with_slot(values, xp.as_int(value), value),
        (X[:8], np.float32(5)),
    ),
    "ema": (lambda x, y, c: xp.ema(x, y, 0.25, c), (SMALL, SMALL[::-1], WHEN)),
    "decremented": (lambda n: xp.decremented(n - 3), (COUNTS,)),
    "streak": (lambda n, a, b: xp.streak(n, a, b, a & b), (COUNTS, WHEN, X > 0)),
    "shared": (lambda c: xp.shared(c), (WHEN,)),
    "shared, a number": (lambda n: xp.shared(n - 1), (COUNTS,)),
}
"""A call of each function of a namespace, with its arrays."""


def _same(found: Any, wanted: np.ndarray) -> None:
    found = np.asarray(found)
    if wanted.dtype.kind == "i":  # a sum of int32 is int64 in some libraries
        found, wanted = found.astype(np.int64), wanted.astype(np.int64)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)
    numbers = ~np.isnan(wanted)
    assert (np.signbit(found) == np.signbit(wanted))[numbers].all()


@pytest.mark.parametrize("name", CALLS)
def test_a_function_gives_the_bits_of_numpy(name: str):
    call, arrays = CALLS[name]
    with np.errstate(all="ignore"):
        wanted = np.asarray(call(*arrays))
        _same(call(*map(jnp.asarray, arrays)), wanted)
        _same(call(*map(torch.as_tensor, map(np.array, arrays))), wanted)
        program = to_program(call, *arrays)
        _same(program(*arrays), wanted)


def test_each_function_of_a_namespace_is_called():
    """A function that is added to a namespace needs a line in `CALLS`."""
    functions = {name for name in vars(ArrayNamespace) if not name.startswith("_")}
    assert functions <= {name.partition(",")[0].partition(" ")[0] for name in CALLS}
