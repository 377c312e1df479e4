"""A program that a scheduler starts again and again: `python -m tests.healer.full_disk_run ...`.

Arguments: the framework, a directory, and a step at which the disk under it fills up (0: never).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from healcore import Checkpoints, Healer
from healcore.runtime.store import Keep
from tests.healer.training_loops import loop_of, rules

LEFT = 8192
"""Bytes that stay free: enough for a record, too few for a checkpoint."""


def fill(folder: Path) -> None:
    file, taken = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY), 0
    try:
        while True:
            taken += os.write(file, bytes(4096))
    except OSError:
        os.ftruncate(file, max(0, taken - LEFT))
    finally:
        os.close(file)


def main(framework: str, folder: Path, full_at: int) -> None:
    policy = rules()
    loop = loop_of(framework, policy=policy)
    keep = Keep(good=50, candidates=50)  # nothing is deleted, which would make room
    store = folder / "run"
    with Healer(
        policy, state=loop.state, store=store, checkpoints=Checkpoints(keep=keep)
    ) as healer:
        for number in healer.batches(list(range(30))):
            if full_at and number == full_at:
                healer._loop.saver.store.wait()  # a save that fails would free its part of the disk
                fill(folder)
            loop.step(healer, number)
    print(f"trained to {healer.step}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
