"""A process that claims a directory. Arguments: directory, time."""

from __future__ import annotations

import sys
import time

from healcore.runtime.store.claim import StoreInUse, claim


def hold(root: str, at: float) -> None:
    """Claims it at a point in time, prints the result, and holds it until stdin ends."""
    time.sleep(max(0.0, at - time.time()))
    try:
        held = claim(root)
        print("held" if held.warning is None else held.warning, flush=True)
    except StoreInUse as error:
        print(error.holder, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(sys.argv[1], float(sys.argv[2]))
