"""What every checkpoint holds besides the user's state: random generators and the data's position.

An item of its own, per rank, and optional: checkpoints from before healcore restore without it.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from healcore.runtime.driver import Generators

ITEM = "healcore"
"""Its name among the saved items."""


class HostState:
    """Saved like any object with `state_dict`; read back by the Healer, piece by piece.

    Args:
        position: tells where the loaders are.
        generators: the framework's, if it has global ones.
    """

    per_rank = True
    optional = True

    def __init__(
        self, position: Callable[[], dict[str, Any]], generators: Generators | None
    ) -> None:
        self._position = position
        self._generators = generators

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and the framework, and where the loaders are."""
        # Positions first: asking a loader for its own may draw random numbers.
        data = pickle.dumps(self._position())
        own = self._generators
        return {
            "python": pickle.dumps(random.getstate()),
            "numpy": pickle.dumps(np.random.get_state()),  # noqa: NPY002 (the global one)
            "framework": pickle.dumps(None if own is None else own.state_dict()),
            "data": data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators, after the data was moved by who knows what to leave out."""
        random.setstate(pickle.loads(state["python"]))
        np.random.set_state(pickle.loads(state["numpy"]))  # noqa: NPY002
        saved = pickle.loads(state["framework"])
        if saved is not None and self._generators is not None:
            self._generators.load_state_dict(saved)


def position_in(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Where the loaders were, from what `state_dict` gave; None of an old checkpoint."""
    return None if state is None else pickle.loads(state["data"])
