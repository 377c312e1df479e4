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
    if isinstance(store, list | tuple):
        steps = [newest_step(each) for each in store]
        return max((step for step in steps if step is not None), default=None)
    if isinstance(store, CheckpointStore):
        return max((each.step for each in store.checkpoints()), default=None)
    if isinstance(store, str | os.PathLike) and Path(store).is_dir():
        return max(scan(Path(store)).complete, default=None)
    return None


def newest_settings(store: Any) -> Mapping[str, Any]:
    """The settings of the run in a store: `RunRecord.settings` of its newest complete checkpoint.

    Args:
        store: the argument `store` of a trainer's callback. From a list, the place with the newest
            checkpoint is read.

    Returns:
        Name -> value; empty without a complete checkpoint in a directory.
    """
    if isinstance(store, list | tuple):
        store = max(store, key=_newest_step_or_before)
    root = store
    if isinstance(store, CheckpointStore):
        root = store.root
    if not isinstance(root, str | os.PathLike) or not Path(root).is_dir():
        return {}
    found = scan(Path(root))
    newest = max(found.complete, default=None)
    if newest is None:
        return {}
    return found.records.get(newest, {}).get("settings", {})


def _newest_step_or_before(store: Any) -> int:
    """The result of `newest_step`, with -1 for None."""
    step = newest_step(store)
    if step is None:
        return -1
    return step
