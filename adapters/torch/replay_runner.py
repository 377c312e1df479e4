"""The torch backend of `healcore replay`: recorded rows through the engine, one by one."""

from __future__ import annotations

import numpy as np
import torch

from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.plugins.rows import (
    DecisionColumns,
    SignalLayout,
    SignalRows,
    empty_columns,
    judge_row,
    rolled_back,
)
from healcore.torch import namespace

_XP = namespace.on("cpu")


class TorchRowRunner:
    """Runs the engine eagerly on the CPU, to compare backends; for speed there is JAX.

    Rejected: `torch.compile`, which needs a C++ compiler and half a minute.
    """

    def __init__(self, engine: Engine, layout: SignalLayout) -> None:
        self._engine = engine
        self._layout = layout

    def start(self) -> EngineState:
        """The engine's first state as tensors."""
        return map_leaves(lambda leaf: torch.from_numpy(np.array(leaf)), self._engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """See `RowRunner.on_rollback`."""
        with torch.inference_mode():
            return rolled_back(self._engine, live, restored, xp=_XP)

    def run(self, state: EngineState, rows: SignalRows) -> tuple[EngineState, DecisionColumns]:
        """See `RowRunner.run`."""
        found = empty_columns(len(rows.kind))
        values = {name: torch.from_numpy(np.array(each)) for name, each in rows.values.items()}
        with torch.inference_mode():
            for row in range(len(rows.kind)):
                names = self._layout.combinations[rows.kind[row]]
                signals = Signals(**{name: values[name][row] for name in names})
                state, row_columns = judge_row(self._engine, state, signals, xp=_XP)
                for column, value in zip(found, row_columns, strict=True):
                    column[row] = value.item()
        return state, found
