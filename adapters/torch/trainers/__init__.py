"""Integrations with the trainers of other libraries, each imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from healcore.runtime.incidents.run_metrics import METRICS

if TYPE_CHECKING:
    from healcore.torch.healing import Healing


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


def logged_metrics(healings: Mapping[str, Healing]) -> dict[str, float]:
    """Metrics of the last step for a logger, such as `heal/skips`. One sync on a GPU.

    With several optimizers the names are `heal/<optimizer>/skips`.
    """
    logged: dict[str, float] = {}
    for name, healing in healings.items():
        prefix = "heal/" if len(healings) == 1 else f"heal/{name}/"
        values = healing.metrics()
        numbers = torch.stack([values[f"heal/{key}"].float() for key in METRICS]).tolist()
        logged |= {f"{prefix}{key}": n for key, n in zip(METRICS, numbers, strict=True)}
    return logged
