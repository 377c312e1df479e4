"""python killed_run.py FOLDER STEP: a healed run that is killed, without notice, at a step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.healer.loops import loop_of, rules, train


def main() -> None:
    folder, at = Path(sys.argv[1]), int(sys.argv[2])

    def die(healer, number):
        if healer.step == at:
            healer.store.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    train(loop_of("torch"), rules(), range(40), store=folder, before=die)


if __name__ == "__main__":
    main()
