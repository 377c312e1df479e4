"""Undoes what the first calls of a user's function change outside of the model."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any

import numpy as np

_MOST = 1000
"""Maximum length of a dictionary or list whose items are restored, and maximum number of these."""


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restores the global generators of Python and NumPy after the block."""
    python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 -- the user may use it
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def same_variables(function: Callable[..., Any]) -> Iterator[None]:
    """Restores the variables that a function and other code of its module can reach.

    These are global variables, variables of closures, defaults, attributes of objects, and the
    items of dictionaries and lists among these. Tensors are not restored.
    """
    module = getattr(function, "__module__", "")
    parts, seen = list[Any]([function]), set[int]()
    with ExitStack() as undo:
        for part in parts:  # grows
            found: list[Any] = []
            if isinstance(part, dict | list):
                undo.callback(_refill, part, copy.copy(part))
            elif isinstance(part, MethodType):
                found = [part.__self__, part.__func__]
            elif isinstance(part, FunctionType):
                with suppress(ValueError):  # a variable of the closure has no value yet
                    names = inspect.getclosurevars(part)
                    found = [*names.nonlocals.values(), *names.globals.values()]
                    undo.callback(part.__globals__.update, names.globals)
                    for cell in part.__closure__ or ():
                        undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                found += part.__defaults__ or ()
            elif hasattr(part, "__dict__"):
                found = [vars(part), *vars(part).values(), vars(type(part)).get("__call__")]
            for each in found:
                small = type(each) in (dict, list) and len(each) <= _MOST
                own = getattr(each, "__module__", None) == module
                if (small or (own and not isinstance(each, type))) and id(each) not in seen:
                    seen.add(id(each))
                    parts += [each] * (len(parts) < _MOST)
        yield


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        for key in container.keys() - content.keys():
            del container[key]
        container.update(content)
