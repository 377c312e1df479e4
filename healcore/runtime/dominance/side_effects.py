"""Undoes the side effects of a user's function outside of the state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any

import numpy as np

_MOST = 1000
"""Maximum length of a dictionary or list that is restored, and maximum number of these."""


@contextmanager
def undone(function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Restores the global generators of Python and NumPy, and variables, after the block.

    The variables are those that code in the module of the function can reach: globals, closures,
    defaults, attributes, items of dictionaries and lists. The contents of tensors are not restored.
    """
    parts, seen = list[Any]([function]), set[int]()
    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 -- users do
        for part in parts:  # grows
            found: list[Any] = []
            if isinstance(part, dict | list):
                refill: Any = part.update if isinstance(part, dict) else part.extend
                undo.callback(refill, copy.copy(part))
                undo.callback(part.clear)  # runs first
            elif isinstance(part, MethodType):
                found = [part.__self__, part.__func__]
            elif isinstance(part, FunctionType):
                used = part.__globals__.keys() & {*part.__code__.co_names}
                variables = {name: part.__globals__[name] for name in used}
                undo.callback(part.__globals__.update, variables)
                found = [*variables.values(), *(part.__defaults__ or ())]
                for cell in part.__closure__ or ():
                    with suppress(ValueError):  # the variable has no value yet
                        found.append(cell.cell_contents)
                        undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
            elif hasattr(part, "__dict__"):
                found = [vars(part), *vars(part).values(), vars(type(part)).get("__call__")]
            for each in found:
                small = type(each) in (dict, list) and len(each) <= _MOST
                own = getattr(each, "__module__", None) == getattr(function, "__module__", "")
                own &= not isinstance(each, type)
                if (small or own) and id(each) not in seen and len(parts) < _MOST:
                    seen.add(id(each))
                    parts.append(each)
        yield
