"""Heals the trainers of other libraries; each library is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replaces one object's attribute for the block, unless other code has replaced it since."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own.get(name) is new:
            if had:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
