"""Optional frameworks: what to install when one is missing."""

from __future__ import annotations

import importlib.util

from healcore.core.errors import HealcoreError


class MissingExtraError(HealcoreError, ImportError):
    """A part of healcore was asked for whose framework is not installed."""


def require(extra: str, *modules: str) -> None:
    """Check that the modules behind an extra are installed, without importing any of them.

    Args:
        extra: Name of the extra in pyproject.toml, for example "jax".
        *modules: Top-level import names that the extra brings, for example "jax", "optax".

    Raises:
        MissingExtraError: At least one is absent. The message names it and the command to run.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"healcore.{extra} needs {', '.join(missing)}, not installed in this environment. "
            f"Write: pip install 'healcore[{extra}]'",
            name=missing[0],
        )
