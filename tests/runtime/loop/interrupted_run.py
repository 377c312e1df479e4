"""A run that can be interrupted: `python -m tests.runtime.loop.interrupted_run FOLDER HOW`."""

from __future__ import annotations

import select
import signal
import sys
from pathlib import Path
from typing import Any

from tests.healer.training_loops import loop_of, rules, train


def main(folder: str, how: str) -> None:
    """Prints its steps. From step 7 on it waits for a line before each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"

    def before(healer: Any, number: int) -> None:
        if number == 7 and not how:
            healer._loop.saver.store.wait()
        print(number, flush=True)
        if number >= 7:
            wait_for_line()

    try:
        train(loop_of("torch"), rules(), range(12), store=Path(folder), before=before)
    except KeyboardInterrupt:
        if how == "caught":
            print("caught", flush=True)
        raise
    finally:
        print("tidied up", flush=True)


def wait_for_line() -> None:
    """Reads one line, and comes back to Python meanwhile.

    A signal that comes just before a blocking read is noted in C, and its handler would run only
    when the read is over.
    """
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
