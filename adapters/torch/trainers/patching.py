"""`patched`: replaces an attribute of one object, and restores the attribute afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Sets an attribute for the block, then restores it, unless other code has replaced it.

    The integrations replace attributes of single objects, so that other objects of the same class
    keep theirs. A method of the class is restored by deleting the attribute of the object. One
    class does change, and stays changed: `huggingface/trainer_hook.py` replaces the method
    `add_callback` of `transformers.Trainer` when it is imported.

    Args:
        owner: the object, or a module.
        name: the attribute.
        new: its value within the block.
    """
    attributes = vars(owner)
    on_instance = name in attributes
    original = attributes.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if attributes.get(name) is new:
            if on_instance:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
