"""Writes 100 events under a limit on file sizes, then one without it.

python -m tests.events.limited_writer PATH BYTES
"""

from __future__ import annotations

import resource
import sys

from healcore.events import Log


def main(path: str, limit: int) -> None:
    log = Log(path)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    written = [log.write("alarm", step=step) for step in range(100)].count(True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(written, log.lost, log.write("end", step=100, ending="completed"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
