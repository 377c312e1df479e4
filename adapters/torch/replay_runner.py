"""The torch backend of `healcore replay`: recorded rows through the engine, one by one."""

from __future__ import annotations

import numpy as np
import torch

from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.tools.replay.feeding import Chunk, Feed
from healcore.tools.replay.judging import Columns, columns, judge
from healcore.torch import namespace

_XP = namespace.on("cpu")


class TorchRunner:
    """Runs the engine eagerly on the CPU; tests/parity compares it with a compiled engine.

    Not `torch.compile`: it needs a C++ compiler and half a minute, and this backend is for
    comparison; for speed there is JAX.
    """

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self._engine = engine
        self._feed = feed

    def start(self) -> EngineState:
        """The engine's first state as tensors."""
        return map_leaves(lambda leaf: torch.from_numpy(np.array(leaf)), self._engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """`Engine.on_rollback`."""
        with torch.inference_mode():
            return self._engine.on_rollback(live, restored, xp=_XP)

    def run(self, state: EngineState, chunk: Chunk) -> tuple[EngineState, Columns]:
        """The state after the chunk, and its columns, NumPy arrays (n,)."""
        found = columns(len(chunk.kind))
        values = {name: torch.from_numpy(np.array(each)) for name, each in chunk.values.items()}
        with torch.inference_mode():
            for row in range(len(chunk.kind)):
                names = self._feed.combinations[chunk.kind[row]]
                signals = Signals(**{name: values[name][row] for name in names})
                state, row_columns = judge(self._engine, state, signals, xp=_XP)
                for column, value in zip(found, row_columns, strict=True):
                    column[row] = value.item()
        return state, found


make = TorchRunner
"""What `healcore.tools.replay.runners` asks an adapter for."""
