"""A process that writes events until it is killed, or a given number of them.

    python -m tests.events.writer PATH COUNT SIZE

COUNT 0 is for ever. SIZE: characters of each event, about.
"""

from __future__ import annotations

import sys

from healcore.events import Log


def main(path: str, count: int, size: int) -> None:
    log = Log(path)
    log.write("start", step=0, policy="default", mode="heal")
    print(log.run, flush=True)
    padding = ["x" * 9000] * (size // 9000) + ["x" * (size % 9000)]
    step = 0
    while step < count or not count:
        log.write("alarm", step=step, index=step, padding=padding)
        step += 1
    log.write("end", step=step, ending="completed")
    print(log.lost, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
