"""Two Ctrl-C in a notebook: `python -m tests.runtime.loop.interrupted_twice FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.healer.training_loops import loop_of, rules, train


def before(healer: Any, number: int) -> None:
    if number == 7:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def main(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.ps1 = ">>> "  # as IPython sets it
    try:
        train(loop_of("torch"), rules(), range(12), store=Path(folder), before=before)
    except KeyboardInterrupt:
        print("alive")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


if __name__ == "__main__":
    main(*sys.argv[1:])
