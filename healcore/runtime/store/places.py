"""The `store` argument of a Healer: a directory, a store, or a list of these.

One directory of a list may be on a fast local disk, and one on a shared disk. A save copies the
state once, and writes this copy to each directory in turn. So each directory is a whole store,
which commands and later runs can use alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.store import CheckpointStore

StorePlace = str | os.PathLike[str] | CheckpointStore
"""A directory for checkpoints, or a store."""
Places = StorePlace | Sequence[StorePlace] | None
"""The `store` argument of a Healer."""


def checked_places(given: Any) -> Any:
    """Checks the `store` argument of a Healer.

    Args:
        given: what the user has passed.

    Returns:
        A place, None, or a tuple of at least two places.

    Raises:
        ValueError: the argument is of another type, names a directory twice, or has a store without
            a directory in a list.
    """
    if isinstance(given, list | tuple) and given:
        places = tuple(map(checked_places, given))
        if len(places) == 1:
            return places[0]
        roots = [root_of(each) for each in places]
        if None in roots or len({*roots}) < len(roots):
            raise ValueError(
                f"the stores of a list have different directories, and here {given!r}: leave out "
                "stores in memory, the newest checkpoints are in host memory too"
            )
        return places
    is_path = isinstance(given, str | os.PathLike) and os.fspath(given)
    if given is None or is_path or isinstance(given, CheckpointStore):
        return given
    raise ValueError(
        "store is a path, a store, None, or a list of paths and stores, as in "
        f'store=["/local/run", "/shared/run"], not {given!r}'
    )


def root_of(place: Any) -> Path | None:
    """The directory of a place, to compare places with each other.

    Args:
        place: a path, a store, a list of these, or None.

    Returns:
        The real path, of the first place of a list. None without a directory.
    """
    if isinstance(place, list | tuple) and place:
        place = place[0]
    if isinstance(place, CheckpointStore):
        place = place.root
    if isinstance(place, str | os.PathLike):
        return Path(place).resolve()
    return None


def joined(stores: Sequence[CheckpointStore]) -> CheckpointStore:
    """One store that writes each checkpoint to the directories of several stores.

    It keeps as many copies in host memory as the first store that keeps any.

    Args:
        stores: stores with a directory each, of one framework, in the order of preference.

    Raises:
        StoreError: the stores have different formats.
    """
    first, roots, patterns = stores[0], [], []
    keep = None
    for each in stores:
        if each.format.name != first.format.name:
            raise StoreError(
                f'the stores of a list have one format, and {first.root} is "{first.format.name}", '
                f'{each.root} is "{each.format.name}": pass stores of one framework'
            )
        roots += each.roots
        patterns += each.nonfinite_ok
        keep = keep or each.keep
    store = CheckpointStore(first.format, roots, keep=keep, ranks=first.ranks)
    store.nonfinite_ok = tuple(patterns)
    return store
