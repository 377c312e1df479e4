"""The same signals through several backends at once, compared bit for bit after every step.

`recorded` is for one run at a time, as in torch's host engine; `jax-scalars` runs lane after lane
with 0-d arrays, which XLA rewrites in ways of its own, and `jax-kernel` does so in one kernel, as
`protect`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import healcore.torch.array_namespace  # noqa: F401  # registers the namespace of tensors
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.engine.state import FROZEN
from healcore.core.signals import Signals
from healcore.core.trees import map_leaves
from healcore.jax.compilation import in_one_kernel
from tests.core import fuzz
from tests.core.engine_runner import recorded, scalars

CHUNK = 50


def steps_equal(
    config: EngineConfig,
    traces: Iterable[Signals],
    against: Sequence[str],
    *,
    groups: int = 0,
    lanes: int = 0,
    reference: str = "numpy",
) -> int:
    """All states and decisions of all backends, from fresh states, have one value.

    Traces are (steps, lanes) or, for `lanes` 0, (steps,). Returns the steps, one per lane.
    """
    engine = Engine(config)
    runs = {name: runner(name, engine) for name in (reference, *against)}
    compared = 0
    for trace in traces:
        fresh = engine.init(groups=groups, batch=(lanes,) if lanes else ())
        states = {name: start(name, fresh) for name in runs}
        for begin in range(0, length(trace), CHUNK):
            chunk = fuzz.part(trace, begin, begin + CHUNK)
            seen = {}
            limit = norm_limits(begin, lanes)
            for name, run in runs.items():
                states[name] = limited(engine, name, states[name], limit)
                states[name], *seen[name] = run(states[name], chunk)
            for name in against:
                difference = first_difference(tuple(seen[reference]), tuple(seen[name]))
                assert difference is None, f"{reference} and {name} from step {begin}: {difference}"
            compared += length(chunk) * max(lanes, 1)
    return compared


def norm_limits(begin: int, lanes: int) -> np.ndarray:
    """Limits of the gradient norm for a chunk: none in the first, then from 0 (none) to 10.

    In a fifth of the lanes the steps of the chunk are frozen.
    """
    lane = np.arange(lanes) if lanes else np.asarray(1)
    kind = (lane + begin // CHUNK) % 5
    limit = np.where(kind == 4, FROZEN, 10.0 ** (kind - 2.0))
    return np.where((begin == 0) | (kind == 0), 0, limit).astype(np.float32)


def limited(engine: Engine, backend: str, state: Any, limit: np.ndarray) -> Any:
    """The state with a limit of the norm or frozen steps, in the backend's own arrays."""
    where: Any = np.where
    given: Any = limit
    if backend.startswith("jax"):
        where = jnp.where
        given = jnp.asarray(limit)
    elif backend.startswith("torch"):
        where = torch.where
        given = _tensor(limit)
    state = engine.limit_norm(state, given)
    frozen = engine.freeze(state).norm_limit
    state = state._replace(norm_limit=where(given == FROZEN, frozen, state.norm_limit))
    return scalars(state) if backend == "recorded" else state


def scalar(trace: Signals, lane: int) -> Signals:
    """One lane, as a trace of 0-d signals."""
    columns = (None if part is None else np.ascontiguousarray(part[:, lane]) for part in trace)
    return Signals(*columns)


def first_difference(a: Any, b: Any) -> str | None:
    """Describes the earliest difference of two trees of (steps, ...) arrays; None without one.

    Floats are compared by their bits: 0.0 and -0.0 differ. Dtypes and shapes count too, but for
    the width of integers, which a torch sum makes 64.
    """
    found: list[tuple[int, str]] = []
    for (name, x), (other, y) in zip(named(a), named(b), strict=True):
        if (name, x.shape, x.dtype) != (other, y.shape, y.dtype):
            return f"{name}: {x.dtype}{x.shape} against {other}: {y.dtype}{y.shape}"
        for place in np.argwhere(bits(x) != bits(y))[:1]:
            at = tuple(map(int, place))
            found.append((at[0], f"{name}{list(at)}: {x[at]!r} against {y[at]!r}"))
    return None if not found else "; ".join(text for _, text in sorted(found)[:6])


def bits(x: np.ndarray) -> np.ndarray:
    """Floats as the integers that have their bits."""
    return x.view(np.int32) if x.dtype == np.float32 else x


def named(tree: Any, place: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The leaves with their names, depth first."""
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", range(len(tree)))
        for field, part in zip(fields, tree, strict=True):
            yield from named(part, f"{place}.{field}" if place else str(field))
    elif tree is not None:
        yield place, np.asarray(tree)


ChunkRunner = Callable[[Any, Signals], tuple[Any, EngineState, Any]]
"""(state, chunk of signals) -> (state, states and decisions stacked along axis 0, in NumPy)."""


def start(backend: str, state: EngineState) -> Any:
    """A NumPy state as the backend's own arrays."""
    if backend.startswith("jax"):
        return map_leaves(jnp.asarray, state)
    if backend.startswith("torch"):
        return map_leaves(_owned, state)
    return scalars(state) if backend == "recorded" else state


def runner(backend: str, engine: Engine) -> ChunkRunner:
    """The engine on a backend, compiled where that is what the backend is for."""
    if backend.startswith("jax"):
        return _jax(engine, one_by_one=backend != "jax", kernel=backend == "jax-kernel")
    if backend == "torch":
        return _stepwise(engine.step, _tensor)

    return _stepwise(recorded(engine) if backend == "recorded" else engine.step, lambda x: x)


def _stepwise(step: Callable[[Any, Signals], Any], wrap: Callable[[Any], Any]) -> ChunkRunner:
    """Calls the engine step by step; outputs are copied, so that nothing can change them later."""

    def run(state: Any, trace: Signals) -> tuple[Any, EngineState, Any]:
        states, decisions = [], []
        for i in range(length(trace)):
            signals = Signals(*(None if x is None else wrap(x) for x in fuzz.at(trace, i)))
            with np.errstate(all="ignore"):
                state, decision = step(state, signals)
            states.append(map_leaves(_copy, state))
            decisions.append(map_leaves(_copy, decision))
        return state, _stacked(states), _stacked(decisions)

    return run


def _jax(engine: Engine, *, one_by_one: bool, kernel: bool) -> ChunkRunner:
    """One jitted scan over the chunk: of all lanes at once, or of each in its turn."""
    judge = engine.step
    step = functools.partial(in_one_kernel, judge) if kernel else judge

    def scan(state: Any, trace: Signals) -> Any:
        def body(state: Any, signals: Signals) -> Any:
            state, decision = step(state, signals)
            return state, (state, decision)

        return jax.lax.scan(body, state, trace)

    @jax.jit
    def in_turn(state: Any, trace: Signals) -> Any:
        by_lane = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), trace)
        state, outputs = jax.lax.map(lambda each: scan(*each), (state, by_lane))
        return state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)

    whole = in_turn if one_by_one else jax.jit(scan)

    def run(state: Any, trace: Signals) -> tuple[Any, EngineState, Any]:
        state, (states, decisions) = whole(state, map_leaves(jnp.asarray, trace))
        return state, map_leaves(np.asarray, states), map_leaves(np.asarray, decisions)

    return run


def _tensor(x: Any) -> torch.Tensor:
    """Shares memory with the trace: nothing may write into a signal."""
    return torch.from_numpy(np.asarray(x))


def _owned(leaf: np.ndarray) -> torch.Tensor:
    """A tensor with torch's own strides: NumPy's of an empty window mean one more compilation."""
    source = torch.from_numpy(np.array(leaf))
    return torch.empty(source.shape, dtype=source.dtype).copy_(source)


def _copy(leaf: Any) -> np.ndarray:
    return np.array(leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)


def length(trace: Signals) -> int:
    """Steps of a trace."""
    return next(len(part) for part in trace if part is not None)


def _stacked(trees: list[Any]) -> Any:
    return map_leaves(lambda *parts: np.stack(parts), trees[0], *trees[1:])
