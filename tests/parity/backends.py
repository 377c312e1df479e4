"""One engine on each backend: NumPy arrays in, the state and the decision of every step out.

`recorded` is for one run at a time, as in torch's host engine; `jax-scalars` runs lane after lane
with 0-d arrays, which XLA rewrites in ways of its own. `torch-graph` is
torch.compile without Inductor: one graph, run by torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from healcore.core.engine import Engine, EngineState
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.jax import namespace as jax_namespace
from healcore.torch.engines import Namespace
from tests.core import fuzz

Run = Callable[[Any, Signals], tuple[Any, EngineState, Any]]
"""(state, chunk of signals) -> (state, states and decisions stacked along axis 0, in NumPy)."""

_TORCH = Namespace(torch.device("cpu"))


def missing(backend: str) -> str | None:
    """Why this machine cannot run the backend, or None."""
    if backend == "torch-compiled" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "torch.compile needs a C++ compiler on a CPU, and there is none"
    return None


def start(backend: str, state: EngineState) -> Any:
    """A NumPy state as the backend's own arrays."""
    if backend.startswith("jax"):
        return map_leaves(jnp.asarray, state)
    if backend.startswith("torch"):
        return map_leaves(_owned, state)
    if backend == "recorded":
        return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, state)
    return state


def runner(backend: str, engine: Engine) -> Run:
    """The engine on a backend, compiled where that is what the backend is for."""
    if backend.startswith("jax"):
        return _jax(engine, one_by_one=backend == "jax-scalars")
    if backend == "torch":
        return _stepwise(lambda s, x: engine.step(s, x, xp=_TORCH), _tensor)
    if backend in ("torch-compiled", "torch-graph"):
        torch.compiler.reset()  # or the recompilation limit would count other tests' engines
        compiled = torch.compile(
            lambda s, x: engine.step(s, x, xp=_TORCH),
            fullgraph=True,
            backend="inductor" if backend == "torch-compiled" else "eager",
        )

        def step(state: Any, signals: Signals) -> Any:
            # Two names of one tensor in the state (the LR multiplier and its telemetry) would be
            # two tensors at the first step and one at the second: compiled twice.
            return compiled(map_leaves(torch.clone, state), signals)

        return _stepwise(step, _tensor)
    if backend == "recorded":
        return _stepwise(_recorded(engine), lambda x: x)

    def one(state: Any, signals: Signals) -> Any:
        with np.errstate(all="ignore"):
            return engine.step(state, signals, xp=np)

    return _stepwise(one, lambda x: x)


def _recorded(engine: Engine) -> Callable[[Any, Signals], Any]:
    programs: dict[Any, Any] = {}

    def step(state: Any, signals: Signals) -> Any:
        there = tuple(value is None for value in signals)
        if there not in programs:
            programs[there] = record(engine.step, state, signals)
        with np.errstate(all="ignore"):
            return programs[there](state, signals)

    return step


def _stepwise(step: Callable[[Any, Signals], Any], wrap: Callable[[Any], Any]) -> Run:
    """Calls the engine step by step; outputs are copied, so that nothing can change them later."""

    def run(state: Any, trace: Signals) -> tuple[Any, EngineState, Any]:
        states, decisions = [], []
        for i in range(length(trace)):
            signals = Signals(*(None if x is None else wrap(x) for x in fuzz.at(trace, i)))
            state, decision = step(state, signals)
            states.append(map_leaves(_copy, state))
            decisions.append(map_leaves(_copy, decision))
        return state, _stacked(states), _stacked(decisions)

    return run


def _jax(engine: Engine, *, one_by_one: bool) -> Run:
    """One jitted scan over the chunk: of all lanes at once, or of each in its turn."""

    def step(state: Any, signals: Signals) -> Any:
        return engine.step(state, signals, xp=jax_namespace)

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
