"""Finds what an adapter provides; the only module that imports an adapter by its name.

It is in the lowest layer for the runtime's use, and imports a framework only on demand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from healcore.core.errors import HealcoreError

FRAMEWORKS = ("torch", "jax")

_providers: dict[tuple[str, str], Callable[[], Any]] = {}
"""(framework, need) -> a function that imports and returns the implementation."""


class NotProvided(HealcoreError, LookupError):
    """No such framework, or its adapter lacks the need; the message lists the choices."""


def register(framework: str, need: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers the decorated function, which imports and returns an adapter's implementation.

    Args:
        framework: of `FRAMEWORKS`.
        need: the name that healcore looks up, for example "driver".
    """

    def add(provider: Callable[[], Any]) -> Callable[[], Any]:
        _providers[framework, need] = provider
        return provider

    return add


def find(framework: str, need: str) -> Any:
    """An adapter's implementation of `need`; imports the adapter, and with it the framework.

    Raises:
        healcore.extras.MissingExtraError: the framework is not installed.
        NotProvided: there is no such framework, or its adapter does not provide this.
    """
    if framework not in FRAMEWORKS:
        raise NotProvided(f"framework is one of {', '.join(FRAMEWORKS)}, not {framework!r}")
    importlib.import_module(f"healcore.{framework}.plugin")
    if (framework, need) not in _providers:
        there = ", ".join(sorted(name for owner, name in _providers if owner == framework))
        raise NotProvided(
            f"the adapter of {framework} does not provide {need!r}; it provides: {there}"
        )
    return _providers[framework, need]()
