"""Each array namespace has the functions of the core with the same bits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from healcore.core.array_namespace import NUMPY, ArrayNamespace, as_namespace
from healcore.core.clipping import EDGES
from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.core.tape import to_program
from healcore.core.trees import leaves, map_leaves
from healcore.jax.array_namespace import JAX
from healcore.torch.array_namespace import Namespace
from tests.core import policies

_TORCH = Namespace(torch.device("cpu"))
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
    "where": (lambda xp, x, y: xp.where(x > y, x, y), (X, Y)),
    "where, a number": (lambda xp, x: xp.where(x > 0, 1.0, x), (X,)),
    "minimum": (lambda xp, x, y: xp.minimum(x, y), (X, Y)),
    "minimum, a number": (lambda xp, x: xp.minimum(x, 0.3), (X,)),
    "maximum": (lambda xp, x, y: xp.maximum(x, y), (X, Y)),
    "clip": (lambda xp, x: xp.clip(x, -0.3, 0.7), (X,)),
    "sqrt": (lambda xp, x: xp.sqrt(abs(x)), (SMALL,)),
    "sum": (lambda xp, n: xp.sum(n, -1), (COUNTS,)),
    "cumsum": (lambda xp, n: xp.cumsum(n, -1), (COUNTS,)),
    "as_float": (lambda xp, n: xp.as_float(n), (COUNTS,)),
    "as_int": (lambda xp, c: xp.as_int(c), (WHEN,)),
    "arange": (lambda xp, n: xp.arange(len(COUNTS)) + n, (COUNTS,)),
    "asarray": (lambda xp, x: xp.asarray(EDGES)[: len(X)] + x, (X,)),
    "flush": (lambda xp, x: xp.flush(x), (X,)),
    "flush, a limit": (lambda xp, x: xp.flush(x, 1e-12), (X,)),
    "product": (lambda xp, x, y: xp.product(x, y), (SMALL, SMALL[::-1])),
    "product, a number": (lambda xp, x: xp.product(0.1, x), (SMALL,)),
    "quotient": (lambda xp, x, y: xp.quotient(x, y), (X, NONZERO)),
    "quotient, a number": (lambda xp, x: xp.quotient(x, 3.0), (SMALL,)),
    "quotient, a power of two": (lambda xp, x: xp.quotient(x, 0.25), (X,)),
    "flag": (lambda xp, c: xp.flag(c, 12), (WHEN,)),
    "flag of 1": (lambda xp, c: xp.flag(c, 1), (WHEN,)),
    "with_slot": (
        lambda xp, values, value: xp.with_slot(values, xp.as_int(value), value),
        (X[:8], np.float32(5)),
    ),
    "ema": (lambda xp, x, y, c: xp.ema(x, y, 0.25, c), (SMALL, SMALL[::-1], WHEN)),
    "decremented": (lambda xp, n: xp.decremented(n - 3), (COUNTS,)),
    "streak": (lambda xp, n, a, b: xp.streak(n, a, b, a & b, 9), (COUNTS, WHEN, X > 0)),
    "shared": (lambda xp, c: xp.shared(c), (WHEN,)),
    "shared, a number": (lambda xp, n: xp.shared(n - 1), (COUNTS,)),
}
"""A call of each function, in the namespace `xp`, with its arrays."""


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
        wanted = np.asarray(call(NUMPY, *arrays))
        _same(call(JAX, *map(jnp.asarray, arrays)), wanted)
        _same(call(_TORCH, *map(torch.as_tensor, map(np.array, arrays))), wanted)
        program = to_program(lambda *values, xp: call(xp, *values), *arrays)
        _same(program(*arrays), wanted)


def test_each_function_of_a_namespace_is_called():
    """A function that is added to a namespace needs a line in `CALLS`."""
    functions = {name for name in vars(ArrayNamespace) if not name.startswith("_")}
    assert functions <= {name.partition(",")[0].partition(" ")[0] for name in CALLS}


def test_an_engine_takes_a_library_with_the_functions_of_numpy():
    assert as_namespace(np) is NUMPY
    assert as_namespace(JAX) is JAX
    engine = Engine(policies.full("zclip"))
    given = Signals(
        loss=np.float32(2), grad_norm=np.float32(3), eval_loss=np.float32(2), learning_rate=None
    )
    wanted = engine.step(engine.init(), given, xp=NUMPY)
    plain = engine.step(engine.init(), given, xp=np)
    traced = engine.step(
        map_leaves(jnp.asarray, engine.init()), map_leaves(jnp.asarray, given), xp=jnp
    )
    for a, b, c in zip(leaves(wanted), leaves(plain), leaves(traced), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, np.asarray(c))
