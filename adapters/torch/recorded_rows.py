"""The torch backend of `healcore replay`: recorded rows through the engine, one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from healcore.core.engine import EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.plugins.rows import DecisionColumns, NumpyRowRunner, judge_row, rolled_back
from healcore.torch import namespace

_XP = namespace.on("cpu")


class TorchRowRunner(NumpyRowRunner):
    """Runs the engine eagerly on the CPU, to compare backends; for speed there is JAX.

    Rejected: `torch.compile`, which needs a C++ compiler and half a minute.
    """

    def start(self) -> EngineState:
        """The engine's first state as tensors."""
        return map_leaves(lambda leaf: torch.from_numpy(np.array(leaf)), self.engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """See `RowRunner.on_rollback`."""
        with torch.inference_mode():
            return rolled_back(self.engine, live, restored, xp=_XP)

    def run(
        self, state: EngineState, values: Mapping[str, Any], kind: np.ndarray
    ) -> tuple[EngineState, DecisionColumns]:
        """See `RowRunner.run`."""
        tensors = {name: torch.from_numpy(np.array(each)) for name, each in values.items()}
        with torch.inference_mode():
            return super().run(state, tensors, kind)

    def _program(self, state: EngineState, signals: Signals) -> Callable[..., Any]:
        return functools.partial(judge_row, self.engine, xp=_XP)
