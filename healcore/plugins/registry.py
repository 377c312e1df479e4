"""What each framework's adapter provides. The only place that imports an adapter by its name.

It is on the lowest floor, so that the runtime can use it too; it imports a framework only when
something of it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from healcore.core.errors import HealcoreError

FRAMEWORKS = ("torch", "jax")

_providers: dict[tuple[str, str], Callable[[], Any]] = {}
"""(framework, need) -> imports and returns what meets the need."""


class NotProvided(HealcoreError, LookupError):
    """No such framework, or its adapter lacks what was asked for; the message lists the choices."""


def register(framework: str, need: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Decorates a function that imports and returns what an adapter provides.

    Args:
        framework: of `FRAMEWORKS`.
        need: the name under which healcore looks it up, for example "driver".
    """

    def add(provider: Callable[[], Any]) -> Callable[[], Any]:
        _providers[framework, need] = provider
        return provider

    return add


def find(framework: str, need: str) -> Any:
    """What an adapter provides; imports the adapter, and with it the framework.

    Args:
        framework: of `FRAMEWORKS`.
        need: see `register`.

    Raises:
        healcore.extras.MissingExtraError: the framework is not installed; says what to install.
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
