"""The `store` argument of a Healer: a directory, a list of directories, or a store.

One directory of a list may be on a fast local disk, and one on a shared disk. A save copies the
state once, and writes this copy to each directory in turn. So each directory is a whole store,
which commands and later runs can use alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healcore.runtime.store.store import CheckpointStore, Root

Places = Root | Sequence[Root] | CheckpointStore | None
"""The `store` argument of a Healer."""


def checked_places(given: Any) -> Any:
    """Checks the `store` argument of a Healer.

    Args:
        given: what the user has passed.

    Returns:
        A directory, a tuple of directories, a store or None.

    Raises:
        ValueError: the argument is of another type, or names a directory twice.
    """
    if given is None or isinstance(given, CheckpointStore):
        return given
    places = tuple(given) if isinstance(given, list | tuple) else (given,)
    are_paths = [isinstance(each, str | os.PathLike) and bool(os.fspath(each)) for each in places]
    if not are_paths or not all(are_paths):
        raise ValueError(
            "store is a path, a list of paths, a store or None, as in "
            f'store=["/local/run", "/shared/run"], not {given!r}'
        )
    if len({Path(each).resolve() for each in places}) < len(places):
        raise ValueError(f"the directories of a list are different ones, and here {given!r}")
    first, *others = places
    return places if others else first
