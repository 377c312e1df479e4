"""What a trainer asks about the run in a store before the Healer is open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healcore.runtime.store.manifest import scan
from healcore.runtime.store.store import CheckpointStore


def newest_step(store: Any) -> int | None:
    """Step of the newest complete checkpoint in a store, a directory or a list.

    Trainers ask before the Healer is open, because they load their own checkpoint earlier.

    Args:
        store: the argument `store` of a trainer's callback.

    Returns:
        The number of optimizer steps, or None without a complete checkpoint.
    """
    return max(_saves(store), default=None)


def newest_settings(store: Any) -> Mapping[str, Any]:
    """The settings of the run in a store: `RunRecord.settings` of its newest complete checkpoint.

    Args:
        store: the argument `store` of a trainer's callback.

    Returns:
        Name -> value; empty without a complete checkpoint in a directory.
    """
    saves = _saves(store)
    record = saves[max(saves)] if saves else None
    return (record or {}).get("settings", {})


def _saves(store: Any) -> Mapping[int, Mapping[str, Any] | None]:
    """Step -> record of each complete checkpoint of a `store` argument."""
    if isinstance(store, CheckpointStore):
        return {**{each.step: None for each in store.checkpoints()}, **store.records()}
    places = store if isinstance(store, list | tuple) else (store,)
    paths = [Path(each) for each in places if isinstance(each, str | os.PathLike)]
    found, _ = scan(*(each for each in paths if each.is_dir()))
    return {step: first.manifest.record for step, (first, *_) in found.items()}
