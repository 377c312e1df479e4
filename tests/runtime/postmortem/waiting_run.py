"""A run that writes its events and then waits to be killed.

python -m tests.runtime.postmortem.waiting_run PATH
"""

from __future__ import annotations

import sys
import time

from healcore.events import Log
from tests.events.sample_events import SAMPLES


def main(path: str) -> None:
    log = Log(path)
    log.write("start", step=0, **SAMPLES["start"])
    log.write("good", step=300)
    log.write("good", step=400)
    log.write("incident", step=412, **{**SAMPLES["incident"], "onset": 412, "incident": 2})
    log.write("alarm", step=412, **SAMPLES["alarm"])
    log.write("resume", step=300, checkpoint=300)
    log.write("rollback", step=413, **SAMPLES["rollback"])
    log.write("save", step=350, why="regular")
    print(log.run, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
