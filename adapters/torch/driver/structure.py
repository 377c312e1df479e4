"""`StructureWatch`: notices that the program has added, removed or resized parameters.

Programs prune, widen and add layers, unfreeze a layer in a new parameter group, replace a head, or
densify a cloud of Gaussians. Older checkpoints and copies of weights do not fit such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from healcore.torch.live_state import State, modules

_LAZY = ()
"""Shape of a parameter that has none yet."""


class StructureWatch:
    """Compares the structure of a state with the structure at the last look.

    Each step looks at the identities of modules and parameters, and the shapes of the optimizers'
    parameters. Names are compared only if one of them has changed.

    Args:
        state: the state of the run.
        optimizers: its optimizers by name, without wrappers.
    """

    def __init__(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        self._state = state
        self._optimizers = optimizers
        self._remember()

    def changes(self) -> list[str]:
        """What has changed since the last call.

        Returns:
            A short text for each change, for example "model.0.weight is new". Empty without one.
        """
        if self._seen == self._look():
            return []
        before = self._layout
        self._remember()
        texts: list[str] = []
        for path in {**before, **self._layout}:
            if path not in before:
                texts.append(f"{path} is new")
            elif path not in self._layout:
                texts.append(f"{path} is gone")
            elif before[path] not in (_LAZY, self._layout[path]):
                texts.append(f"{path} has other parameters or another shape")
        return texts

    def _remember(self) -> None:
        """Remembers the structure as it is now."""
        live = modules(self._state)
        self._tables: list[dict[str, Any]] = []
        """The parameters and the submodules of each module."""
        for module in live.values():
            self._tables += [module._parameters, module._modules]
        self._seen = self._look()
        self._layout: dict[str, Any] = {}
        """Path of a parameter -> its shape; optimizer -> its parameters."""
        for path, module in live.items():
            for name, p in module._parameters.items():
                self._layout[f"{path}.{name}"] = _LAZY
                if p is None or not is_lazy(p):
                    self._layout[f"{path}.{name}"] = getattr(p, "shape", None)
        for name, optimizer in self._optimizers.items():
            self._layout[name] = [[*map(id, group["params"])] for group in optimizer.param_groups]

    def _look(self) -> list[Any]:
        """What differs after almost every change, and is fast to compare."""
        seen: list[Any] = []
        for table in self._tables:
            seen += map(id, table.values())
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    seen.append(id(p))
                    with suppress(RuntimeError):  # a lazy parameter has no shape yet
                        seen.append(p.shape)
        return seen
