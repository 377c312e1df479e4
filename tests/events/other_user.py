"""Prints whether the process PID of this host is gone, as seen by a user who may not signal it.

python -m tests.events.other_user PID
"""

from __future__ import annotations

import os
import sys

from healcore.events.process import current_process


def main(pid: int) -> None:
    process = current_process()._replace(pid=pid, born=None)
    os.setuid(65534)  # after the imports: nobody may not be allowed to read the checkout
    print(process.gone())


if __name__ == "__main__":
    main(int(sys.argv[1]))
