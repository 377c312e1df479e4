"""Checks for optional frameworks; the error names the extra to install."""

from __future__ import annotations

import importlib.util

from healcore.core.errors import HealcoreError


class MissingExtraError(HealcoreError, ImportError):
    """The framework that a part of healcore needs is not installed."""


def require(extra: str, *modules: str) -> None:
    """Checks that the modules of an extra are installed, without importing them.

    Args:
        extra: name of the extra in pyproject.toml, for example "jax".
        *modules: top-level names of the modules in the extra, for example "jax", "optax".

    Raises:
        MissingExtraError: a module is missing. The message names it and the command to run.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"healcore.{extra} needs {', '.join(missing)}, which this environment lacks. "
            f"In a checkout of healcore run: pip install '.[{extra}]'",
            name=missing[0],
        )
