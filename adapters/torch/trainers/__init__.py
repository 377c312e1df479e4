"""Integrations with the trainers of other libraries, each imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Sets an attribute for the block, then restores it, unless other code has replaced it."""
    attributes = vars(owner)
    on_instance, original = name in attributes, attributes.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if attributes.get(name) is new:
            if on_instance:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
