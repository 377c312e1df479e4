"""What a run ran on: versions of what decides its numbers."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

import healcore

# Not the command line, not the environment's variables: both hold people's keys and passwords.
_ASKED = (
    "numpy",
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "orbax-checkpoint",
    "torchdata",
    "grain",
    "transformers",
    "lightning",
)


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _ASKED:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def environment() -> dict[str, str]:
    """Name -> version: healcore, Python, the system, and the frameworks that are installed."""
    return {
        "healcore": healcore.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **dict(_versions()),
    }
