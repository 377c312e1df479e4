"""Registry of the capabilities that the framework adapters provide.

Only this module imports an adapter by name, and only on demand. It is in the lowest layer, so that
the runtime can use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from healcore.core.errors import HealcoreError

FRAMEWORKS = ("torch", "jax")

_providers: dict[tuple[str, str], Callable[[], Any]] = {}
"""Functions that import and return an implementation, by (framework, capability)."""


class NotProvided(HealcoreError, LookupError):
    """The framework is unknown, or its adapter lacks the capability."""


def register(framework: str, capability: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers the decorated function, which imports and returns an implementation.

    Args:
        framework: one of `FRAMEWORKS`.
        capability: the name that `find` looks up, for example "driver".
    """

    def add(provider: Callable[[], Any]) -> Callable[[], Any]:
        _providers[framework, capability] = provider
        return provider

    return add


def find(framework: str, capability: str) -> Any:
    """Imports an adapter, and with it the framework, and returns its implementation.

    Raises:
        healcore.extras.MissingExtraError: the framework is not installed.
        NotProvided: the framework is unknown, or its adapter lacks the capability.
    """
    if framework not in FRAMEWORKS:
        raise NotProvided(f"framework must be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    importlib.import_module(f"healcore.{framework}.plugin")
    if (framework, capability) not in _providers:
        provided = ", ".join(sorted(name for owner, name in _providers if owner == framework))
        raise NotProvided(
            f"the adapter of {framework} does not provide {capability!r}; it provides: {provided}"
        )
    return _providers[framework, capability]()
