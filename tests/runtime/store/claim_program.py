"""Claims a directory at a point in time, prints the result, and holds it until stdin ends."""

from __future__ import annotations

import sys
import time

from healcore.runtime.store.claim import StoreInUse, claim

if __name__ == "__main__":
    time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
    try:
        held = claim(sys.argv[1])
        print("held" if held.warning is None else held.warning, flush=True)
    except StoreInUse as error:
        print(error.holder, flush=True)
    sys.stdin.read()
