"""Processes that claim a directory. Arguments: `hold`, `fork` or `outlived`, directory, time."""

from __future__ import annotations

import os
import signal
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


def fork(root: str) -> None:
    """A forked child neither releases the parent's claim nor has it."""
    held = claim(root)
    pid = os.fork()
    if not pid:
        held.release()
        try:
            claim(root)
        except StoreInUse as error:
            os._exit(7 if f"process {os.getppid()} on" in error.holder else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    held.release()
    claim(root).release()
    print("fine")


def outlived(root: str) -> None:
    """Is killed while it holds the directory; a child of it survives."""
    held = claim(root)
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    assert held.warning is None
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(sys.argv[2], float(sys.argv[3]))
    else:
        {"fork": fork, "outlived": outlived}[sys.argv[1]](sys.argv[2])
