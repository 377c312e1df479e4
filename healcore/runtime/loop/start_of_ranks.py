"""What the ranks of a run compare before it starts, and the warning of a rank that waits for them.

What differs would show later only, when the ranks wait for each other or nothing can be restored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from healcore import console
from healcore.runtime.store import StoreError
from healcore.runtime.store.ranks import Ranks, on_first

_SILENT_S = 30.0
"""A rank that waits as long for the others warns."""
_VISIBLE_S = 5.0
"""How long a new file may take to be seen by the other ranks, on a network disk."""


def check_same(mine: Mapping[str, Any], ranks: Ranks) -> None:
    """Raises ValueError on all ranks if they have other options: they would wait for each other."""
    for rank, theirs in enumerate(ranks.gather(dict(mine))):
        differ = [name for name, value in mine.items() if theirs[name] != value]
        if differ:
            raise ValueError(
                f"rank {rank} has another {', '.join(differ)} than rank {ranks.rank}: pass the "
                "same to Healer(...) on every rank"
            )


@contextlib.contextmanager
def warning_if_late(of: str, advice: str, then: Callable[[], object] = int) -> Iterator[None]:
    """Warns if the other ranks do not come: a program may have a Healer on rank 0 only.

    Args:
        of: what waits, for a sentence.
        advice: what to do about it.
        then: called after the warning, in another thread.
    """

    def warn() -> None:
        console.warning(f"{of} has waited {_SILENT_S:g} s for those of the other ranks: {advice}")
        then()

    timer = threading.Timer(_SILENT_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_one_directory(folder: Path | None, ranks: Ranks) -> None:
    """Raises StoreError on all ranks if one does not see the directory in which rank 0 writes.

    Otherwise that is found at the first restart only, when nothing can be restored.
    """
    if folder is None or ranks.world == 1:
        return
    name = f".tmp-healcore-{os.getpid()}-{secrets.token_hex(8)}"

    def leave() -> str | None:
        try:
            (folder / name).touch()
        except OSError:  # the store raises a better message
            return None
        return name

    left = on_first(ranks, leave)
    until = time.monotonic() + _VISIBLE_S
    while not (seen := left is None or (folder / left).exists()) and time.monotonic() < until:
        time.sleep(0.1)
    found = ranks.gather((seen, str(folder.absolute())))
    if ranks.rank == 0 and left is not None:
        (folder / left).unlink(missing_ok=True)
    blind = [rank for rank, (sees, _) in enumerate(found) if not sees]
    if blind:
        raise StoreError(
            f"rank {blind[0]} does not see in {found[blind[0]][1]} what rank 0 writes to "
            f"{found[0][1]}: all ranks need one directory (a name with the time or the rank in it "
            "is another one on each; broadcast it from rank 0)"
        )
